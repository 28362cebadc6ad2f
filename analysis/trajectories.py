"""Curves of arms as figures show them: the mean over seeds, its band, and the change from a baseline, pair by pair.

Only steps that all of an arm's seeds have are shown: a mean whose seeds come and go jumps for no reason of its own.
Seeds that diverged are left out from the start, unless all did; that they did is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fewbits.analysis.engine.frames import Damaged, Results
from fewbits.analysis.engine.statistics import ALPHA, summary
from fewbits.analysis.plots import Array
from fewbits.sweeps.running.store import State

POINTS = 25  # that a curve of every step is averaged to


@dataclass(frozen=True)
class Series:
    """Over tokens. band: from the least to the greatest seed of a level, the 90 % interval of a change."""

    tokens: Array
    mean: Array
    band: tuple[Array, Array] | None  # none with one seed
    trials: tuple[str, ...]

    @property
    def few(self) -> bool:
        return self.tokens.size <= POINTS // 2


def curves(results: Results, metric: str) -> pd.DataFrame:
    """As `Results.curves`, and nothing where nobody has recorded the metric yet."""
    try:
        frame = results.curves(metric)
    except Damaged:
        raise
    except ValueError:
        return pd.DataFrame(columns=["arm", "seed", "id", "state", "step", "tokens", "value"])
    return frame[np.isfinite(frame["value"].astype(float))]


def smoothed(frame: pd.DataFrame, results: Results) -> pd.DataFrame:
    """Of what every step has, means of as many steps as leave POINTS of a whole trial, and of what remains at its end.
    A trial may be several arms'."""
    parts = []
    for (trial, _), one in frame.drop_duplicates(["id", "arm", "step"]).groupby(["id", "arm"], sort=False):
        width = max(1, results.plan.trials[str(trial)].trial.training.steps // POINTS)
        place = np.arange(len(one)) // width
        means = one.groupby(place)["value"].mean()
        parts.append(one.groupby(place).last().assign(value=means))
    return pd.concat(parts, ignore_index=True) if parts else frame


def level(frame: pd.DataFrame, arm: str) -> Series | None:
    """The arm's own numbers."""
    table = _table(frame, arm)
    if table.empty:
        return None
    values = table.to_numpy(float)
    band = (values.min(1), values.max(1)) if values.shape[1] > 1 else None
    return Series(table.index.to_numpy(float), values.mean(1), band, _trials(frame, arm))


def change(frame: pd.DataFrame, arm: str, baseline: str) -> Series | None:
    """Relative to the baseline of the same seed at the same step."""
    ours, theirs = _table(frame, arm), _table(frame, baseline)
    seeds = [seed for seed in ours.columns if seed in theirs.columns]
    steps = ours.index.intersection(theirs.index)
    if not seeds or steps.empty:
        return None
    a, b = (table.loc[steps, seeds].to_numpy(float) for table in (ours, theirs))
    found = [summary(row, 1 - 2 * ALPHA) for row in (a - b) / np.abs(b)]
    intervals = [one.interval for one in found if one.interval is not None]
    band = (np.array([i.low for i in intervals]), np.array([i.high for i in intervals])) if intervals else None
    trials = (*_trials(frame, arm), *_trials(frame, baseline))
    return Series(steps.to_numpy(float), np.array([one.mean for one in found]), band, trials)


def thinned(series: Series | None) -> Series | None:
    """Means of as many points as leave POINTS of them, without their band."""
    if series is None:
        return None
    width = max(1, series.tokens.size // POINTS)
    whole = series.tokens.size // width * width
    mean = series.mean[:whole].reshape(-1, width).mean(1)
    return Series(series.tokens[width - 1 : whole : width], mean, None, series.trials)


def starts(results: Results) -> dict[str, int]:
    """The step of the whole line that each trial begins at: 0, or where its parent was."""

    def start(trial: str) -> int:
        planned = results.plan.trials[trial]
        return 0 if planned.parent is None else start(planned.parent) + (planned.trial.branch.step or 0)

    return {member.id: start(member.id) for member in results.members}


def diverged(results: Results, arms: tuple[str, ...]) -> tuple[str, ...]:
    """In words, for a figure's notes."""
    rows = results.trials
    gone = rows[rows["arm"].isin(arms) & (rows["state"] == State.DIVERGED)]
    return tuple(f"{row.arm}, seed {row.seed}: diverged at step {row.step}" for row in gone.itertuples())


def _table(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Tokens × seeds, of steps that every seed has."""
    rows = frame[frame["arm"] == arm]
    whole = rows[rows["state"] != str(State.DIVERGED)]
    return (
        (rows if whole.empty else whole)
        .drop_duplicates(["tokens", "seed"])
        .pivot(index="tokens", columns="seed", values="value")
        .dropna()
    )


def _trials(frame: pd.DataFrame, arm: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(frame.loc[frame["arm"] == arm, "id"]))
