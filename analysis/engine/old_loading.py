"""What a study's tables, figures and claims are made by: the modules of the folder of its name, `analysis/mor/` say.

They register themselves when they are imported, so a shelf is full once `load` has been called.
"""

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parents[1]


def load(study: str) -> None:
    """Import the study's modules; nothing where it has none yet."""
    for path in sorted((FOLDER / study).glob("*.py")):
        import_module(f"fewbits.analysis.{study}.{path.stem}")
