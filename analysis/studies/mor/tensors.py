"""What the observer saw of MoR's tensors, as tables by trial, block, part and slot.

A tensor is one row of the heat maps: a part of a block (qkv, out, up, down) and a slot. Where one decision serves both
directions of a tensor the trial has the three slots SHARED of it; where each direction has its own (channel), six.
In the paper's words up is FC1 and down is FC2; blocks are counted from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import pandas as pd

from fewbits.analysis.engine.frames import Results
from fewbits.kernels.quantizer import ErrorBelow, Mixture
from fewbits.models.observer import BINS

QKV, OUT, FC1, FC2 = "qkv", "out", "up", "down"
PARTS = (QKV, OUT, FC1, FC2)
X, W, DY = (
    "fprop.x",
    "fprop.w",
    "dgrad.dy",
)  # activation, weight and gradient; by rows, where each direction has its own
X_COLUMNS, W_COLUMNS, DY_COLUMNS = "wgrad.x", "dgrad.w", "wgrad.dy"
COLUMNS = {X: X_COLUMNS, W: W_COLUMNS, DY: DY_COLUMNS}
FORWARD = (X, W, X_COLUMNS, W_COLUMNS)
KEY = ["id", "block", "part", "slot"]


@cache
def high(spelled: str) -> int | None:
    """Which entry of a mixture is BF16; None for what is no mixture with one."""
    if " | " not in spelled:
        return None
    formats = [str(entry.quantizer.format) for entry in Mixture.parse(spelled).entries]
    return formats.index("bf16") if "bf16" in formats else None


@cache
def accepts_below(spelled: str) -> float:
    """The error up to which a mixture's first entry is taken; NaN where that is no number."""
    test = Mixture.parse(spelled).entries[0].test if " | " in spelled else None
    return test.threshold if isinstance(test, ErrorBelow) else float("nan")


def looked_at(results: Results) -> pd.DataFrame:
    """A row for each window, tensor and trial: its errors, and the share of its decisions that were BF16."""
    return results.remembered("looked at", lambda: _looked_at(results))


def _looked_at(results: Results) -> pd.DataFrame:
    numerics = results.numerics()
    columns = [
        *KEY,
        "step",
        "quantizer",
        "batches",
        "error",
        "error_max",
        "histogram",
        "fallback",
        "fp8",
        "limit",
        "flushed",
    ]
    if numerics.empty:
        return pd.DataFrame(columns=columns)
    rows = numerics[numerics["error"].notna()].drop_duplicates([*KEY, "step"]).copy()
    rows["block"] = rows["block"] + 1
    rows["limit"] = [accepts_below(spelled) for spelled in rows["quantizer"]]
    shares = ("share_0", "share_1", "share_2", "share_3")
    taken = rows.reindex(columns=list(shares)).to_numpy(float)
    which = [high(spelled) for spelled in rows["quantizer"]]
    rows["fallback"] = [np.nan if place is None else taken[i, min(place, 3)] for i, place in enumerate(which)]
    rows["fp8"] = taken[:, 0]
    return rows.reindex(columns=columns).reset_index(drop=True)


def first(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each trial its first window."""
    return rows[rows["step"] == rows.groupby("id")["step"].transform("min")]


def last(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each trial its last window: the end of training, as in the paper's heat maps."""
    return rows[rows["step"] == rows.groupby("id")["step"].transform("max")]


def fallback_shares(rows: pd.DataFrame) -> dict[str, float]:
    """Of each trial: the share of tensors in BF16, each tensor and window alike; of sub-tensor arms, of blocks."""
    return _by_id(rows.dropna(subset=["fallback"]).groupby("id")["fallback"].mean())


def below(rows: pd.DataFrame, threshold: float) -> dict[str, float]:
    """Of each trial: the share of mini-batches' tensors whose error is below an edge of the histogram's bins."""
    edges = np.flatnonzero(np.isclose(BINS, threshold))
    if len(edges) != 1:
        raise ValueError(f"threshold {threshold}: an edge of the histogram is expected, a multiple of {BINS[1]}")
    under = [sum(counts[: edges[0]]) / sum(counts) for counts in rows["histogram"]]
    return _by_id(pd.Series(under, index=rows["id"], dtype=float).groupby(level=0).mean())


def largest_accepted(rows: pd.DataFrame) -> dict[str, float]:
    """Of each trial whose test is a number: the greatest error of a tensor that was quantized all the same.

    Where a tensor's worst mini-batch was refused, what was accepted lies below the limit: that is taken.
    """
    taken = rows[(rows["fp8"] > 0) & rows["limit"].notna()]
    greatest = taken[["error_max", "limit"]].min(axis=1)
    return _by_id(greatest.groupby(taken["id"]).max())


@dataclass(frozen=True)
class Seen:
    """What one trial's tensors have of something: their mean relative errors, or shares in BF16."""

    values: pd.Series  # by block, part and slot

    @property
    def blocks(self) -> list[int]:
        return sorted(set(self.values.index.get_level_values("block")))

    def of(self, block: int, part: str, slot: str) -> float:
        return float(self.values.loc[(block, part, slot)])

    def greatest(self, where: Callable[[int, str, str], bool]) -> float:
        return float(max(value for key, value in self.values.items() if where(*cast(tuple[int, str, str], key))))


def numbers(
    results: Results,
    number: Callable[[Seen], float],
    column: str = "error",
    window: Callable[[pd.DataFrame], pd.DataFrame] = last,
) -> dict[str, float]:
    """The same by trial; one whose model has not the parts or the blocks that are asked for has none."""
    rows = window(looked_at(results)).dropna(subset=[column])
    found = {}
    for key, seen in rows.groupby(KEY)[column].mean().groupby(level="id"):
        try:
            found[str(key)] = number(Seen(seen.droplevel("id")))
        except (KeyError, ValueError):
            continue
    return found


def _by_id(found: pd.Series) -> dict[str, float]:
    return {str(key): float(value) for key, value in found.items()}
