"""Import what a study registers: the modules of its folder, `analysis/studies/mor/` for example."""

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parents[1]
HOOKS = ("metrics*.py", "exact*.py")  # modules that claims need; the others are tables and figures


def load_hooks(study: str) -> None:
    """Import the study's hooks of claims, if it has any."""
    for pattern in HOOKS:
        for path in sorted((FOLDER / "studies" / study).glob(pattern)):
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")
