"""The decisions of mixtures, from what the observer recorded: shares that fell back to BF16, and histograms of errors.

The BF16 trunk and the arm `watched` quantize nothing; what 128x128 blocks would have decided is read off their errors.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.figures.series import starts
from fewbits.analysis.figures.theme import Array
from fewbits.kernels.quantizer import Mixture
from fewbits.models.observer import BINS, ENTRIES

THRESHOLD = paper("mor").numbers["threshold"].value
TRUNK, WATCHED = "trunk", "watched"
EDGES: Array = np.append(np.arange(0, len(BINS) - 1) * 0.005, np.inf)
_ABOVE = np.array([edge > THRESHOLD - 1e-9 for edge in EDGES[:-1]])
_COLUMNS = ["arm", "seed", "id", "state", "step", "block", "part", "slot", "batches", "histogram", "fallback"]
ONE, TWO = {"configuration": "1"}, {"configuration": "2"}
PARTS = {"qkv": "linear_qkv", "out": "linear_proj", "up": "fc1", "down": "fc2", "in": "in_proj"}  # the paper's names


def decisions(results: Results) -> pd.DataFrame:
    """Return a row for each window, layer and slot that a mixture decided; `fallback`: the share of its last entry."""
    frame = results.numerics()
    if frame.empty or "quantizer" not in frame:
        return pd.DataFrame(columns=_COLUMNS)
    frame = frame[(frame["slot"] != "weight") & frame["quantizer"].fillna("").str.contains("|", regex=False)].copy()
    last = {text: min(len(Mixture.parse(text).entries), ENTRIES) - 1 for text in frame["quantizer"].unique()}
    shares = frame[[f"share_{i}" for i in range(ENTRIES)]].to_numpy(float)
    frame["fallback"] = shares[np.arange(len(frame)), frame["quantizer"].map(last).to_numpy(int)]
    observed = frame["arm"].isin((TRUNK, WATCHED))
    above = [float(np.asarray(h)[_ABOVE].sum() / max(np.sum(h), 1)) for h in frame.loc[observed, "histogram"]]
    frame.loc[observed, "fallback"] = above
    frame["line_step"] = frame["step"] + 1 + frame["id"].map(starts(results))
    return frame


def fallback_over_steps(results: Results) -> pd.DataFrame:
    """Return the share of decisions for BF16 by trial and window as `value`, and the line's step as `tokens`."""
    frame = decisions(results)
    if frame.empty:
        return pd.DataFrame(columns=["arm", "seed", "id", "state", "tokens", "value"])
    return share(frame, ["arm", "seed", "id", "state", "line_step"]).rename(columns={"line_step": "tokens"})


def share(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the fallback of each group as `value`: every tensor and window counts alike."""
    return frame.groupby(by, sort=False)["fallback"].mean().rename("value").reset_index()


def at_end(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the last window of each trial."""
    return frame[frame["step"] == frame.groupby("id")["step"].transform("max")]


def counts(frame: pd.DataFrame, slots: Collection[str] = ()) -> Array:
    """Return the sum of the histograms over all seeds and layers of the table."""
    rows = frame[frame["slot"].isin(slots)] if slots else frame
    return np.sum([np.asarray(h, float) for h in rows["histogram"]], axis=0) if len(rows) else np.zeros(len(BINS) - 1)
