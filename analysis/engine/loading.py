"""Import the modules of a study's folder, such as `analysis/studies/mor/`, which register the study's hooks."""

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parents[1]
HOOKS = ("metrics*.py", "exact*.py")  # the modules that claims need; the others define tables and figures


def load_hooks(study: str) -> None:
    """Import the modules with the hooks of the study's claims, if there are any."""
    for pattern in HOOKS:
        for path in sorted((FOLDER / "studies" / study).glob(pattern)):
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")
