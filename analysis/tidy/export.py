"""Write frames of runs as Parquet, CSV, or a data set of Hugging Face's `datasets`.

    FOLDER/trials.parquet  metrics.parquet  numerics.parquet  precision.parquet  evaluation.parquet  timing.parquet
    README.md

README.md has the schema. For Hugging Face it is a dataset card, whose header makes each table a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from fewbits.analysis.tidy.long import COLUMNS, LABELS
from fewbits.common.atomic import folder_atomically
from fewbits.common.from_dict import one_of

FORMS = {"parquet": "parquet", "csv": "csv", "huggingface": "parquet"}  # the files' suffix by form


def write_export(frames: Mapping[str, pd.DataFrame], folder: Path, form: str) -> Path:
    """Write the frames into a folder that is new or empty; raise ValueError otherwise, and for an unknown form."""
    one_of("form", form, FORMS)
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists; export into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_atomically(folder) as partial:
        for name, frame in frames.items():
            path = partial / f"{name}.{FORMS[form]}"
            # Other programs read a category as a number with a dictionary
            texts = frame.astype(dict.fromkeys(frame.select_dtypes("category"), "string"))
            texts.to_csv(path, index=False) if form == "csv" else texts.to_parquet(path, index=False)
        (partial / "README.md").write_text(_card(frames, form), "utf-8")
        if folder.exists():
            folder.rmdir()
    return folder


def _card(frames: Mapping[str, pd.DataFrame], form: str) -> str:
    """Return README.md: the schema, and for Hugging Face the header that lists the tables."""
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in frames)
    head = f"---\nconfigs:\n{configs}---\n" if form == "huggingface" else ""
    rows = "".join(f"| `{name}` | {about} |\n" for name, about in (LABELS | COLUMNS).items())
    return (
        f"{head}# Runs of fewbits\n\n`trials` has a row for each run of a sweep. The other tables are long: they have "
        "a row for each number, and these columns:\n\n| column | content |\n|---|---|\n" + rows + "\n"
        "Further columns are the axes of the sweep. In `trials`, columns with a dot in their name are settings as "
        "`fewbits train` takes them.\n"
    )
