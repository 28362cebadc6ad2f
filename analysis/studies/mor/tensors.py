"""Read what the observer (models/observer.py) recorded of MoR's tensors: errors, histograms, decisions for BF16.

A tensor is identified by a block of the model, a part of this block (qkv, out, up, down) and an operand slot. With
channel blocks a part has six slots, because a tensor's rows and columns have separate decisions; otherwise it has
three. The paper calls `up` FC1 and `down` FC2. The BF16 trunk and the arm `watched` quantize nothing; they only record
the errors that 128x128 blocks would have, from which follow the decisions that the arm Block would have made. The
paper's term mini-batch stands for one of our micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd

from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.paper import paper
from fewbits.kernels.backends.protocol import BINS, CHOICES
from fewbits.kernels.quantizer import ErrorBelow, Mixture

QKV, OUT, FC1, FC2 = "qkv", "out", "up", "down"
PARTS = (QKV, OUT, FC1, FC2)
TITLES = {QKV: "linear_qkv", OUT: "linear_proj", FC1: "fc1", FC2: "fc2", "in": "in_proj"}  # the paper's names
# Slots of the activation, the weight and the gradient. If the directions of a tensor are quantized separately, these
# are the slots of its rows, and X_COLUMNS, W_COLUMNS and DY_COLUMNS are the slots of its columns.
X, W, DY = "fprop.x", "fprop.w", "dgrad.dy"
X_COLUMNS, W_COLUMNS, DY_COLUMNS = "wgrad.x", "dgrad.w", "wgrad.dy"
FORWARD = (X, W, X_COLUMNS, W_COLUMNS)
KEY = ["id", "block", "part", "slot"]
THRESHOLD = paper("mor").numbers["threshold"].value
COUNTED = BINS.stop - BINS.start  # bins
ENTRIES = CHOICES.stop - CHOICES.start  # counts of choices
EDGES = np.append(np.arange(0, COUNTED) * 0.005, np.inf)  # the bounds of the bins
TRUNK, WATCHED = "trunk", "watched"
ONE, TWO = {"configuration": "1"}, {"configuration": "2"}
COLUMNS = [*KEY, "arm", "seed", "state", "step", "line_step", "layer", "batches", "error", "error_max", "histogram"]
NUMBERS = ["flushed", "share_0", "fallback", "limit"]

# A number for each tensor of a trial, by block (counted from 1), part and slot.
Seen = dict[tuple[int, str, str], float]


def observed(results: Results) -> pd.DataFrame:
    """Return a table with a row for each place, window of steps and tensor, and the columns COLUMNS and NUMBERS.

    error, error_max: the mean and the greatest relative error. flushed: the share of flushed values. share_0, fallback:
    the shares of decisions for the mixture's first quantizer, and for BF16, its last; sub-tensor arms decide for each
    block. limit: the error below which the first quantizer is taken; NaN if the test has no such limit. line_step: the
    number of steps since the start of the trunk. block: the block of the model, counted from 0.
    """
    return results.remembered("observed", lambda: _observed(results))


def _observed(results: Results) -> pd.DataFrame:
    numerics = results.numerics()
    if numerics.empty or "error" not in numerics:
        return pd.DataFrame(columns=[*COLUMNS, *NUMBERS])
    rows = numerics[numerics["error"].notna()].copy()
    spelled = rows["quantizer"].fillna("")
    shares = rows.reindex(columns=[f"share_{i}" for i in range(ENTRIES)]).to_numpy(float)
    taken = zip(map(high, spelled), shares, strict=True)
    rows["fallback"] = [np.nan if last is None else of_row[last] for last, of_row in taken]
    rows["limit"] = spelled.map(_limit)
    rows["line_step"] = rows["step"] + 1 + rows["id"].map(results.starts)
    return rows.reindex(columns=[*COLUMNS, *NUMBERS])


@cache
def high(spelled: str) -> int | None:
    """Return the i whose column `share_i` has the decisions for BF16, the last of a mixture; None for a quantizer."""
    return min(len(Mixture.parse(spelled).entries), ENTRIES) - 1 if "|" in spelled else None


@cache
def _limit(spelled: str) -> float:
    test = Mixture.parse(spelled).entries[0].test if "|" in spelled else None
    return test.threshold if isinstance(test, ErrorBelow) else float("nan")


def decisions(results: Results) -> pd.DataFrame:
    """Return rows of `observed` with decisions: of the BF16 trunk and `watched`, those that Block would have made."""
    frame = observed(results).dropna(subset=["fallback"]).copy()
    watched = frame["arm"].isin((TRUNK, WATCHED))
    above = EDGES[:-1] > THRESHOLD - 1e-9
    exceeding = [float(np.asarray(h)[above].sum() / max(np.sum(h), 1)) for h in frame.loc[watched, "histogram"]]
    frame.loc[watched, "fallback"] = exceeding
    return frame


def fallback_over_steps(results: Results) -> pd.DataFrame:
    """Return the share of decisions for BF16 (`value`) by trial and window of steps (`tokens`, from the trunk on)."""
    by = ["arm", "seed", "id", "state", "line_step"]
    return share(decisions(results), by).rename(columns={"line_step": "tokens"})


def share(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the mean of the column `fallback` in each group of rows, as the column `value`; rows weigh the same."""
    return frame.groupby(by, sort=False)["fallback"].mean().rename("value").reset_index()


def counts(frame: pd.DataFrame) -> np.ndarray:
    histograms = [np.asarray(h, float) for h in frame["histogram"]]
    return np.sum(histograms, axis=0) if histograms else np.zeros(COUNTED)


# -------------------------------------------------------------------------------- numbers of each trial


def tensors(results: Results) -> pd.DataFrame:
    """Return the rows of `observed` with each trial only once, even if the plan has it at several places."""
    return results.remembered("tensors", lambda: observed(results).drop_duplicates([*KEY, "step"]))


def first_windows(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["step"] == rows.groupby("id")["step"].transform("min")]


def fallback_shares(rows: pd.DataFrame) -> dict[str, float]:
    """Return the share of decisions for BF16 by trial. All tensors and windows have equal weight."""
    return by_id(rows.dropna(subset=["fallback"]).groupby("id")["fallback"].mean())


def blocks_of(seen: Seen) -> list[int]:
    return sorted({block for block, _, _ in seen})


def numbers(
    results: Results,
    number: Callable[[Seen], float],
    column: str = "error",
    window: Callable[[pd.DataFrame], pd.DataFrame] = last_windows,
) -> dict[str, float]:
    """Return a number for each trial; the function `number` computes it from a quantity of each of the trial's tensors.

    The quantity is the mean of `column` over the rows that `window` chooses. Trials whose models lack a part or block
    that `number` needs are left out.
    """
    found = {}
    for trial, seen in results.remembered(f"seen {column} {window}", lambda: _seen(results, column, window)).items():
        try:
            found[trial] = number(seen)
        except (KeyError, ValueError):
            continue
    return found


def _seen(results: Results, column: str, window: Callable[[pd.DataFrame], pd.DataFrame]) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    means = window(tensors(results)).dropna(subset=[column]).groupby(KEY)[column].mean().astype(float)
    for (trial, block, part, slot), value in zip(means.index, means, strict=True):
        seen.setdefault(str(trial), {})[block + 1, part, slot] = value
    return seen


def by_id(values: pd.Series) -> dict[str, float]:
    return {str(key): float(value) for key, value in values.items()}
