"""How far quantization moves weight gradients: the relative error that the observer measured, by trial and block (N7).

It is the norm of the error over that of the gradient, with one layer's own operands quantized and not: Wgrad's output
from its inputs being in few bits, in the paper's words. Blocks are counted from 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from fewbits.analysis.engine.frames import Results

ERROR = "gradient_error"


def measured(results: Results) -> pd.DataFrame:
    """A row for each linear layer, of each trial's last window in which its gradients were measured."""
    return results.remembered("gradient errors", lambda: _measured(results))


def _measured(results: Results) -> pd.DataFrame:
    numerics = results.numerics()
    columns = ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    last = rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
    return last.assign(block=last["block"] + 1)[columns]


def by_block(results: Results, part: str | None = None) -> Mapping[str, Mapping[int, float]]:
    """Of each trial, by block: the mean over its linear layers, or of one kind of them."""
    rows = measured(results)
    if part is not None:
        rows = rows[rows["part"] == part]
    found: dict[str, dict[int, float]] = {}
    means = rows.groupby(["id", "block"])[ERROR].mean().reset_index()
    for trial, block, value in zip(means["id"], means["block"], means[ERROR], strict=True):
        found.setdefault(str(trial), {})[int(block)] = float(value)
    return found
