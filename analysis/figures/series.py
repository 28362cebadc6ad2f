"""Compute curves of arms over training: the mean over seeds with a band, or the paired change from a baseline.

A curve has only the steps that all of the arm's seeds have, because a mean would jump where a seed is missing. Seeds
that diverged are left out; if all seeds diverged, they are all kept. The notes of figures name the diverged seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from fewbits.analysis.engine.results.frames import METRICS as RECORDED
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.statistics import ALPHA, estimate
from fewbits.analysis.figures.theme import Array
from fewbits.sweeps.planning.store import State

POINTS = 25  # a curve with a value at every step is averaged to about this number of points
MOVING_POINTS = 200  # moving averages have about this number
COLUMNS = ["arm", "seed", "id", "state", "step", "tokens", "value"]
Band = tuple[Array, Array]


@dataclass(frozen=True)
class Metric:
    """A number that trials record during training and that curves show."""

    name: str  # the column of metrics.parquet
    title: str
    unit: str
    every_step: bool = False  # whether it has a value at every step; then curves are averaged over steps
    moving: str = ""  # for a moving average over steps, the function that reduces a window of steps to a point
    of_micro_batches: bool = False  # whether it depends on the size of micro-batches, which differs in A/A runs

    @property
    def dense(self) -> bool:
        return self.every_step or bool(self.moving)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("loss", "Training loss", "nats", every_step=True),
        Metric("loss_max", "Maximum loss", "nats", every_step=True, of_micro_batches=True),
        Metric("loss_average", "Average loss", "nats", moving="mean"),
        Metric("loss_max_average", "Maximum loss", "nats", moving="max", of_micro_batches=True),
        Metric("validation_loss", "Validation loss", "nats"),
        Metric("ood_loss", "Out-of-domain loss", "nats"),
        Metric("parameter_norm", "Parameter norm", "L2"),
    )
}


@dataclass(frozen=True)
class Series:
    """A curve over tokens: the mean over seeds with a band, their range (`level`) or a 90 % interval (`change`)."""

    tokens: Array
    mean: Array
    band: Band | None  # None for one seed
    trials: tuple[str, ...]  # the ids of the trials behind the curve


def curves(results: Results, metric: str) -> pd.DataFrame:
    """Return a row for each place and step at which the metric is finite; the columns include COLUMNS."""
    frame = results.curves(metric) if metric in results.table_of(RECORDED) else pd.DataFrame(columns=COLUMNS)
    return frame[np.isfinite(frame["value"].astype(float))]


def recorded(results: Results, metric: Metric) -> pd.DataFrame:
    """Return the table of `curves`, over windows if the metric has a value at every step; it is cached in `results`."""

    def read() -> pd.DataFrame:
        frame = curves(results, metric.name)
        return _smoothed(frame, results, metric) if metric.dense else frame

    return results.remembered(f"curves {metric.name}", read)


def _smoothed(frame: pd.DataFrame, results: Results, metric: Metric) -> pd.DataFrame:
    """Return the table with one value for each of about as many windows of steps as a curve has points."""
    points, how, parts = MOVING_POINTS if metric.moving else POINTS, metric.moving or "mean", []
    for (trial, _), one in frame.drop_duplicates(["id", "arm", "step"]).groupby(["id", "arm"], sort=False):
        width = max(1, results.plan.trials[str(trial)].trial.training.steps // points)
        place = (one["step"] - one["step"].min()).to_numpy() // width  # an archive has no row for each step
        means = one.groupby(place)["value"].agg(how)
        parts.append(one.groupby(place).last().assign(value=means))
    return pd.concat(parts, ignore_index=True) if parts else frame


def level(frame: pd.DataFrame, arm: str) -> Series | None:
    """Return the curve of the arm's own numbers; None if there is no step that all of its seeds have."""
    table = _tokens_by_seeds(frame, arm)
    if table.empty:
        return None
    values = table.to_numpy(float)
    band = (values.min(1), values.max(1)) if values.shape[1] > 1 else None
    return Series(table.index.to_numpy(float), values.mean(1), band, trials_of(frame, arm))


def change(frame: pd.DataFrame, arm: str, baseline: str) -> Series | None:
    """Return the curve of (arm - baseline) / |baseline| over the seeds and tokens of both; None without any."""
    ours, theirs = _tokens_by_seeds(frame, arm), _tokens_by_seeds(frame, baseline)
    seeds = [seed for seed in ours.columns if seed in theirs.columns]
    steps = ours.index.intersection(theirs.index)
    if not seeds or steps.empty:
        return None
    a, b = (table.loc[steps, seeds].to_numpy(float) for table in (ours, theirs))
    trials = (*trials_of(frame, arm), *trials_of(frame, baseline))
    return Series(steps.to_numpy(float), *means_with_band((a - b) / np.abs(b)), trials)


def means_with_band(samples: Iterable[ArrayLike]) -> tuple[Array, Band | None]:
    """Return the mean of each sample, and the ends of their 90 % intervals; None if a sample is a single value."""
    values = [np.asarray(sample, float) for sample in samples]
    intervals = [one.interval(1 - 2 * ALPHA) for one in map(estimate, values) if one is not None]
    band = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
    return np.array([one.mean() for one in values]), band if len(intervals) == len(values) else None


def switches(part: Results, arms: Sequence[str]) -> tuple[float, ...]:
    """Return the different numbers of tokens after which recipes of these arms change quantizers, ascending."""
    found: set[float] = set()
    frame = curves(part, "loss")
    for trial, steps in frame[frame["arm"].isin(list(arms))].groupby("id"):
        of = part.plan.trials[str(trial)].trial
        before = steps[steps["step"] < of.recipe.switch.at * of.training.steps]
        if of.recipe.switches and len(before) < len(steps):
            found.add(float(before["tokens"].max()))
    return tuple(sorted(found))


def diverged(results: Results, arms: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each diverged trial of these arms: the arm, the seed and the step."""
    rows = results.trials
    gone = rows[rows["arm"].isin(list(arms)) & (rows["state"] == State.DIVERGED)]
    return tuple(f"{row.arm}, seed {row.seed}: diverged at step {row.step}" for row in gone.itertuples())


def trials_of(frame: pd.DataFrame, arm: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(frame.loc[frame["arm"] == arm, "id"]))


def _tokens_by_seeds(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Return an arm's values by number of tokens (rows) and seed (columns), without gaps and diverged seeds."""
    rows = frame[frame["arm"] == arm]
    whole = rows[rows["state"] != str(State.DIVERGED)]
    kept = (rows if whole.empty else whole).drop_duplicates(["tokens", "seed"])
    return kept.pivot(index="tokens", columns="seed", values="value").dropna()
