"""Write DataFrames of runs to a folder, as Parquet, CSV, or a data set for Hugging Face's `datasets`.

    FOLDER/trials.parquet  metrics.parquet  numerics.parquet  precision.parquet  evaluation.parquet  timing.parquet
    README.md

README.md describes the columns. For Hugging Face it is also the dataset card: its header lists each table as a
configuration, which `load_dataset(FOLDER, TABLE)` loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from fewbits.analysis.tidy.long import COLUMNS, LABELS
from fewbits.common.atomic import folder_atomically
from fewbits.common.from_dict import one_of

FORMS = {"parquet": "parquet", "csv": "csv", "huggingface": "parquet"}  # value of `form` → suffix of the files


def write_export(frames: Mapping[str, pd.DataFrame], folder: Path, form: str) -> Path:
    """Write each frame to FOLDER/NAME.parquet or .csv, write README.md, and return the folder's absolute path.

    frames: name → frame. form: `parquet`, `csv` or `huggingface` (Parquet files and a dataset card). Raise ValueError
    if the folder exists and is not empty, or if the form is unknown. The folder appears only when all files are
    complete.
    """
    one_of("form", form, FORMS)
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; export into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_atomically(folder) as partial:
        for name, frame in frames.items():
            path = partial / f"{name}.{FORMS[form]}"
            # Write categories as strings: some programs would read the numbers that pandas stores for them.
            texts = frame.astype(dict.fromkeys(frame.select_dtypes("category"), "string"))
            texts.to_csv(path, index=False) if form == "csv" else texts.to_parquet(path, index=False)
        (partial / "README.md").write_text(_card(frames, form), "utf-8")
        if folder.exists():
            folder.rmdir()
    return folder


def _card(frames: Mapping[str, pd.DataFrame], form: str) -> str:
    """Return the content of README.md: a table of the columns, and for Hugging Face a header that lists the tables."""
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in frames)
    head = f"---\nconfigs:\n{configs}---\n" if form == "huggingface" else ""
    rows = "".join(f"| `{name}` | {about} |\n" for name, about in (LABELS | COLUMNS).items())
    return (
        f"{head}# Runs of fewbits\n\n`trials` has a row for each run of a sweep. The other tables are in long form: "
        "each row has one measured number. They have these columns:\n\n| column | content |\n|---|---|\n" + rows + "\n"
        "There is also a column for each axis of the sweep. In `trials`, a column with a dot in its name is a setting, "
        "with the name that `fewbits train` uses.\n"
    )
