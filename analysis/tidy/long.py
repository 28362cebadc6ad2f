"""Convert the tables of run folders to long form: DataFrames with one row for each measured number.

All long frames have the columns named in LABELS and COLUMNS, in this order, and then one for each axis of the sweep. So
the frames of several tables, sweeps and stores can be concatenated. A column that does not apply to a row is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fewbits.common.from_dict import one_of

# The columns that say which run a row belongs to, with their descriptions; the frame of trials has them, too.
LABELS = {
    "run": "the name of the run folder",
    "study": "the study, or the name of the sweep file; empty for the runs of a whole store",
    "scale": "the scale; empty for the runs of a whole store",
    "sweep": "the sweep; empty for the runs of a whole store",
    "arm": "the arm; empty for the runs of a whole store",
    "seed": "the seed of initial weights, data order and noise",
    "model": "the model",
    "recipe": "the recipe",
    "data": "the kind of data",
}
COLUMNS = {
    "table": "metrics, numerics, precision, evaluation or timing: the file of the run folder",
    "step": "the step, counted from 0; for numerics, the last step of a window",
    "tokens": "the number of tokens trained until this step, including the trunk's; for evaluation, the number of "
    "tokens in the document",
    "layer": "numerics: the name of the linear layer; precision: the name of the parameter or of the linear layer",
    "block": "numerics: the number of the transformer block that contains the layer",
    "part": "numerics: the layer's role in the block: qkv, out, up, down and so on",
    "slot": "numerics: the operand slot, such as fprop.x, or `weight` for values of the whole layer; precision: "
    "`parameter`, or `dy` for gradients of outputs",
    "quantizer": "numerics: the quantizer or mixture of the slot",
    "text": "evaluation: validation or ood",
    "document": "evaluation: the number of the document in its text",
    "metric": "the name of the number; `histogram.N` is bin N of a histogram of relative errors or of exponents",
    "value": "the number; unknown numbers (NaN) have no row",
}
TABLES = ("metrics", "numerics", "precision", "evaluation", "timing")
_WHOLE = ("step", "tokens", "block", "document")  # columns of integers
_VALUES = ("metric", "value")


def long_frame(folders: Sequence[Path], labels: pd.DataFrame, tables: Sequence[str]) -> pd.DataFrame:
    """Return the given tables of these run folders as one frame in long form: one row for each measured number.

    If a folder lacks the file of a table, the frame has no rows of this table for the folder. labels: a frame with a
    row for each folder, in order; its columns are those named in LABELS and one for each axis. tables: names from
    TABLES.
    """
    for table in tables:
        one_of("table", table, TABLES)
    parts, rows = [], []
    for row, folder in enumerate(folders):
        for table in tables:
            if (path := folder / f"{table}.parquet").is_file():
                parts.append(_melted(_read(path)).assign(table=table))
                rows += [row] * len(parts[-1])
    long = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    long = long.reindex(columns=[*COLUMNS]).astype(dict.fromkeys(_WHOLE, "Int64") | {"value": "float64"})
    texts = [name for name in COLUMNS if name not in (*_WHOLE, "value")]
    long = long.astype(dict.fromkeys(texts, "category"))  # a study has millions of rows with few different texts
    named = labels.astype({name: "category" for name in LABELS if name != "seed"}).iloc[rows].reset_index(drop=True)
    axes = [name for name in named if name not in LABELS]
    return pd.concat([named[[*LABELS]], long, named[axes]], axis=1)


def _read(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is damaged ({reason}): remove the run folder that contains this file, and run the trial again"
        ) from None


def _melted(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert a run folder's table to long form, one row for each number; a histogram gives one row for each bin."""
    if "histogram" in frame:
        known = frame["histogram"].dropna()
        if not known.empty:
            frame = frame.join(pd.DataFrame(np.stack(known.to_list()), index=known.index).add_prefix("histogram."))
        frame = frame.drop(columns="histogram")
    keys = [name for name in COLUMNS if name in frame]
    return frame.melt(id_vars=keys, var_name="metric", value_name="value").dropna(subset=["value"])
