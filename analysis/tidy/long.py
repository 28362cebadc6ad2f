"""Convert the tables of run folders to long form: DataFrames with one row for each measured number.

All long frames have the columns named in LABELS and COLUMNS, in this order, and then one for each axis of the sweep. So
the frames of several tables, sweeps and stores can be concatenated. A column that does not apply to a row is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fewbits.analysis.engine.results.frames import read_table
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
    "tokens": "the tokens trained until this step, including the trunk's; for evaluation, those of the document",
    "layer": "numerics: the name of the linear layer; precision: the name of the parameter or of the linear layer",
    "block": "numerics: the number of the transformer block that contains the layer",
    "part": "numerics: the layer's role in the block: qkv, out, up, down and so on",
    "slot": "the operand slot, such as fprop.x, `weight` for values of the whole layer, or `parameter`",
    "quantizer": "numerics: the quantizer or mixture of the slot",
    "text": "evaluation: validation or ood",
    "document": "evaluation: the number of the document in its text",
    "metric": "the name of the number; `histogram.N` is bin N of a histogram of relative errors or of exponents",
    "value": "the number; unknown numbers (NaN) have no row",
}
TABLES = ("metrics", "numerics", "precision", "evaluation", "timing")
_WHOLE = ("step", "tokens", "block", "document")  # columns of integers


def long_frame(trials: pd.DataFrame, axes: Sequence[str], tables: Sequence[str]) -> pd.DataFrame:
    """Return these tables of all trials' run folders as one frame in long form: one row for each measured number.

    A folder without the file of a table adds no rows. trials: as in `Runs`. tables: names from TABLES.
    """
    for table in tables:
        one_of("table", table, TABLES)
    parts, rows = [], []
    for row, folder in enumerate(trials["folder"]):
        for table in tables:
            if (path := Path(folder) / f"{table}.parquet").is_file():
                parts.append(_melted(read_table(path)).assign(table=table))
                rows += [row] * len(parts[-1])
    long = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    long = long.reindex(columns=[*COLUMNS]).astype(dict.fromkeys(_WHOLE, "Int64") | {"value": "float64"})
    texts = [name for name in COLUMNS if name not in (*_WHOLE, "value")]
    long = long.astype(dict.fromkeys(texts, "category"))  # a study has millions of rows with few different texts
    labels = trials[[*LABELS]].astype({name: "category" for name in LABELS if name != "seed"})
    labels = labels.join(trials[[axis for axis in axes if axis not in LABELS]]).iloc[rows].reset_index(drop=True)
    return pd.concat([labels[[*LABELS]], long, labels.drop(columns=[*LABELS])], axis=1)


def _melted(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert a run folder's table to long form, one row for each number; a histogram gives one row for each bin."""
    if "histogram" in frame:
        known = frame["histogram"].dropna()
        if not known.empty:
            frame = frame.join(pd.DataFrame(np.stack(known.to_list()), index=known.index).add_prefix("histogram."))
        frame = frame.drop(columns="histogram")
    keys = [name for name in COLUMNS if name in frame]
    return frame.melt(id_vars=keys, var_name="metric", value_name="value").dropna(subset=["value"])
