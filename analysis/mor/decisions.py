"""What mixtures decided, from numerics: shares that fell back to BF16, and histograms of the errors behind them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from fewbits.analysis.arms import TRUNK
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.mor.looks import THRESHOLD, WATCHED
from fewbits.analysis.plots import Array
from fewbits.analysis.trajectories import starts
from fewbits.kernels.quantizer import Mixture
from fewbits.models.observer import BINS, ENTRIES

OBSERVED = (TRUNK, WATCHED)  # whose decisions are none: what 128x128 blocks would have decided is read off their errors
EDGES: Array = np.append(np.arange(0, len(BINS) - 1) * 0.005, np.inf)
_ABOVE = np.array([edge > THRESHOLD - 1e-9 for edge in EDGES[:-1]])
_COLUMNS = ["arm", "seed", "id", "state", "step", "block", "part", "slot", "batches", "histogram", "fallback"]


def decisions(results: Results) -> pd.DataFrame:
    """A row for each window, layer and slot that a mixture decided; `fallback`: the share of its last entry."""
    frame = results.numerics()
    if frame.empty or "quantizer" not in frame:
        return pd.DataFrame(columns=_COLUMNS)
    frame = frame[(frame["slot"] != "weight") & frame["quantizer"].fillna("").str.contains("|", regex=False)].copy()
    last = {text: min(len(Mixture.parse(text).entries), ENTRIES) - 1 for text in frame["quantizer"].unique()}
    shares = frame[[f"share_{i}" for i in range(ENTRIES)]].to_numpy(float)
    frame["fallback"] = shares[np.arange(len(frame)), frame["quantizer"].map(last).to_numpy(int)]
    observed = frame["arm"].isin(OBSERVED)
    above = [float(np.asarray(h)[_ABOVE].sum() / max(np.sum(h), 1)) for h in frame.loc[observed, "histogram"]]
    frame.loc[observed, "fallback"] = above
    begun = starts(results)
    frame["line_step"] = frame["step"] + 1 + frame["id"].map(begun)
    return frame


def fallback_over_steps(results: Results) -> pd.DataFrame:
    """Of each trial and window the share of decisions that fell back: `value`, and `tokens`: the line's step."""
    frame = decisions(results)
    if frame.empty:
        return pd.DataFrame(columns=["arm", "seed", "id", "state", "tokens", "value"])
    return share(frame, ["arm", "seed", "id", "state", "line_step"]).rename(columns={"line_step": "tokens"})


def share(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Fallback of each group, `value`: every tensor and window alike, however many micro-batches looked at it."""
    return frame.groupby(by, sort=False)["fallback"].mean().rename("value").reset_index()


def at_end(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each trial its last window."""
    return frame[frame["step"] == frame.groupby("id")["step"].transform("max")]


def counts(frame: pd.DataFrame, slots: Collection[str] = ()) -> Array:
    """The sum of the histograms, of all seeds and layers that are there."""
    rows = frame[frame["slot"].isin(slots)] if slots else frame
    return np.sum([np.asarray(h, float) for h in rows["histogram"]], axis=0) if len(rows) else np.zeros(len(BINS) - 1)
