"""Get the data of a claim's comparison: choose the sweep, resolve the metric, pair the trials, add known errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from fewbits.analysis.engine.claims.schema import DIVERGED, EVENTS, LOSS, Comparison
from fewbits.analysis.engine.results.data import Differences, Events, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.evaluations import (
    PROBE_METRIC,
    best_of_recent,
    document_error,
    documents,
    probe_numbers,
)
from fewbits.analysis.engine.results.frames import SCORES, Results
from fewbits.analysis.engine.results.pairing import Between, Metric, arm_rows, line_of, number, paired, sample
from fewbits.analysis.engine.results.places import ANYWHERE, Scope, Where, not_planned, pairs_of, scope_of
from fewbits.analysis.engine.results.rows import Row, why_not_compared
from fewbits.analysis.engine.statistics import Error, pseudo_values, relative_slope
from fewbits.experiments.evaluation.loss import WIDTHS
from fewbits.sweeps.planning.store import OVER, State

LATE = "@late"  # METRIC@late is the mean of METRIC over the last tenth of the steps
BEST = "@best"  # METRIC@best is its greatest value over the last checkpoints that were evaluated (`best_of_recent`)
TASKS = "tasks."  # the start of the names of downstream scores, for example tasks.piqa.acc,none
QUESTIONS = 1000.0  # degrees of freedom of a score's standard error
AGAIN = "-again"  # the arm ARM-again is like ARM, but its sums are rounded in another order
# The losses that are also stored for each document: metric → column in evaluation.parquet.
BY_DOCUMENT = {LOSS: "loss"} | {
    f"{LOSS}_{form}": f"loss_{form}" for form in ("unquantized", "cast", *(f"cast{w}" for w in WIDTHS))
}


@dataclass(frozen=True)
class Numbers:
    """A metric: a column of `Results.trials`, {trial id: number}, or a function of two ids; `bounds` limit it."""

    name: str
    values: Metric | Between
    bounds: tuple[float, float] | None = None

    @property
    def is_loss(self) -> bool:
        return "loss" in self.name


def built_in(results: Results, name: str) -> Numbers:
    """Return a built-in metric: a column of trials, with LATE or BEST, or `probe:VARIANT:MEASURE` (`probe_numbers`)."""
    if name.startswith(PROBE_METRIC):
        return Numbers(name, probe_numbers(results, name))
    if name.endswith(BEST):
        scores = results.table_of(SCORES)
        return Numbers(name, best_of_recent(scores[scores["name"] == name.removesuffix(BEST)]) if len(scores) else {})
    return Numbers(name, results.late(name.removesuffix(LATE)) if name.endswith(LATE) else name)


def data_of(results: Results, comparison: Comparison, numbers: Callable[[Results, str], Numbers]) -> Measured:
    """Return the differences of a comparison's pairs, without a baseline the arm's numbers, or why there are none."""
    part, compared = comparison.part, [one for one in (comparison.arm, comparison.baseline) if one]
    found = scope_of(results, compared, part.sweep, part.where, part.baseline_where)
    if found is None or (len(compared) == 2 and not pairs_of(found)):
        return not_planned(results)
    scope, arm, where = found.results, found.arms[0], found.where
    if comparison.metric == DIVERGED or part.test in EVENTS:
        return _divergence(found)
    metric = numbers(scope if part.sweep else results, comparison.metric)
    values, bounds = metric.values, metric.bounds
    if isinstance(values, str) and values not in scope.metrics():
        pairs = pairs_of(found) if len(compared) == 2 else [(row["id"],) for row in arm_rows(scope, arm, where)]
        ids = dict.fromkeys(trial for pair in pairs for trial in pair)
        return NoData(f"no trial has recorded the metric {comparison.metric}", tuple(ids))
    if len(compared) == 1:
        assert not callable(values)
        own = sample(scope, values, arm, where)
        return replace(own, bounds=bounds, observed=not metric.is_loss) if isinstance(own, Differences) else own
    baseline = found.arms[1]
    data = paired(scope, values, arm, baseline, where, baseline_where=found.base, relative=part.relative)
    if isinstance(data, NoData):
        return data
    if not metric.is_loss:  # diverged trials count as evidence only for losses, not for shares or errors
        data = replace(data, diverged=0, baseline_diverged=0, observed=not comparison.metric.startswith(TASKS))
    if bounds is not None:
        data = replace(data, bounds=bounds if callable(values) else (bounds[0] - bounds[1], bounds[1] - bounds[0]))
    data = replace(data, shared=_shared(found, comparison))
    if metric.is_loss and not callable(values):
        data = replace(data, noise=again_noise(results, scope, values, part.relative), slope=_slope(found))
    return data


def formula(
    results: Results,
    arms: Mapping[str, tuple[Sequence[str], str, Metric]],
    combine: Callable[[Mapping[str, float]], float],
    *,
    relative: bool = True,
) -> Differences | NoData | NotPlanned:
    """Return one number that is computed from several arms, such as a ratio of two loss increases, for each seed.

    arms: name → (sweeps, arm, metric); the first of the sweeps counts that the scale has. combine: a function of {name:
    mean over the seeds}, which raises ValueError if it is undefined for these numbers. The values are the jackknife's
    pseudo-values of the seeds (`pseudo_values`); with one seed, the error follows from A/A comparisons of losses. A
    seed is used if each of its trials has a number and all were computed in the same environment; otherwise a note says
    why not. Return NotPlanned if the plan lacks an arm, and NoData if no seed is used or `combine` raises ValueError.
    """
    planned = {(member.cell.sweep, member.cell.arm) for member in results.members}
    rows: dict[str, dict[int, Row]] = {}
    for name, (sweeps, arm, _) in arms.items():
        sweep = next((sweep for sweep in sweeps if sweep in {of for of, _ in planned}), "")
        if (sweep, arm) not in planned:
            return not_planned(results)
        rows[name] = {row["seed"]: row for row in arm_rows(results.of_sweep(sweep), arm)}
    for _, _, metric in arms.values():
        if isinstance(metric, str) and metric not in results.metrics():
            return NoData(f"no trial has recorded the metric {metric}")
    by_seed: list[dict[str, float]] = []
    reasons: list[str] = []
    for seed in sorted(set.intersection(*map(set, rows.values()))):
        first, *others = (seeds[seed] for seeds in rows.values())
        numbers = {name: number(results, seeds[seed], arms[name][2]) for name, seeds in rows.items()}
        missing = [reason for reason in numbers.values() if isinstance(reason, str)]
        unlike = (why_not_compared(first, other, results.usual_kind) for other in others)
        reasons += (missing := missing or [reason for reason in unlike if reason])
        if not missing:
            by_seed.append({name: float(value) for name, value in numbers.items()})
    trials = tuple(dict.fromkeys(row["id"] for seeds in rows.values() for row in seeds.values()))
    notes = tuple(dict.fromkeys(reasons))
    if not by_seed:
        return NoData("; ".join(notes) or "no seed has a finished trial in every arm", trials)
    again = again_noise(results, results, LOSS, True) if len(by_seed) == 1 else None
    noise: Error | None = None
    try:
        values = pseudo_values(by_seed, combine)
        if again is not None:
            row, each = by_seed[0], again.error / math.sqrt(2)
            changes = (combine(row | {name: value * (1 + each)}) - values[0] for name, value in row.items())
            noise = Error(math.sqrt(sum(change**2 for change in changes)), again.df)
    except ValueError as error:
        return NoData(f"no value for the means over all seeds, or over all seeds but one: {error}", trials)
    return Differences(tuple(values), relative, trials, notes, noise=noise)


def score_distance(
    results: Results,
    arms: Sequence[str],
    baseline: str,
    names: Sequence[str],
    sweeps: Sequence[str] = (),
    where: Where = ANYWHERE,
) -> Differences | NoData | NotPlanned:
    """Return, by seed, the median over arms and tasks of |score − the baseline's score|, in points."""
    by_seed: dict[int, list[float]] = {}
    ids: list[str] = []
    for arm in arms:
        found = scope_of(results, (arm, baseline), sweeps, where)
        if found is None:
            return not_planned(results)
        seeds = {member.id: member.cell.seed for member in found.results.members}
        scores = [found.results.numbers(name) for name in names]
        for ours, base in pairs_of(found):
            ids += [ours, base]
            points = [100 * abs(one[ours] - one[base]) for one in scores if {ours, base} <= set(one)]
            by_seed.setdefault(seeds[ours], []).extend(points)
    values, trials = tuple(median(one) for one in by_seed.values() if one), tuple(dict.fromkeys(ids))
    return Differences(values, trials=trials, observed=True) if values else NoData("no stored scores", trials)


def _divergence(found: Scope) -> Events | NoData:
    places = zip(found.arms, (found.where, found.where if found.base is None else found.base), strict=True)
    rows = [arm_rows(found.results, arm, where, shared=True) for arm, where in places]
    over = [[row for row in of_arm if row["state"] in OVER] for of_arm in rows]
    if not all(over):
        return NoData("an arm has no finished trial", tuple(row["id"] for of_arm in rows for row in of_arm))
    ours, base = ([row["state"] == State.DIVERGED for row in of_arm] for of_arm in over)
    ids = tuple(row["id"] for of_arm in over for row in of_arm)
    return Events(sum(ours), len(ours), sum(base), len(base), ids)


def again_noise(results: Results, scope: Results, metric: Metric, relative: bool) -> Error | None:
    """Return the error of one pair's difference from A/A comparisons: of this sweep, or else of all; None without."""
    key = metric if isinstance(metric, str) else str(sorted(metric.items()))
    for among in (scope, results):
        name = f"A/A {'+'.join(dict.fromkeys(member.cell.sweep for member in among.members))} {key} {relative}"
        if found := results.remembered(name, partial(_again, among, metric, relative)):
            return Error(math.sqrt(sum(value**2 for value in found) / len(found)), len(found))
    return None


def _again(results: Results, metric: Metric, relative: bool) -> list[float]:
    found: list[float] = []
    for sweep, arm, axes in dict.fromkeys((m.cell.sweep, str(m.cell.arm), m.cell.axes) for m in results.members):
        scope, base, where = results.of_sweep(sweep), arm.removesuffix(AGAIN), dict(axes)
        known = not isinstance(metric, str) or metric in scope.metrics()
        if arm.endswith(AGAIN) and scope.has(base, where) and known:
            data = paired(scope, metric, arm, base, where, relative=relative)
            found += data.values if isinstance(data, Differences) else ()
    return found


def _shared(found: Scope, comparison: Comparison) -> Error | None:
    """Return the standard error of a mean difference that comes from the choice of documents or questions, if known."""
    pairs, relative = pairs_of(found), comparison.part.relative
    if comparison.metric.startswith(TASKS):
        task, _, form = comparison.metric.removesuffix(BEST).rpartition(".")
        name, _, way = form.partition(",")
        errors = found.results.numbers(f"{task}.{name}_stderr,{way}")
        known = [math.hypot(errors[ours], errors[base]) for ours, base in pairs if {ours, base} <= set(errors)]
        return Error(sum(known) / len(known), QUESTIONS) if known and not relative else None
    if (column := BY_DOCUMENT.get(comparison.metric)) is None:
        return None
    losses = found.results.remembered(f"documents {column}", lambda: documents(found.results, column))
    return document_error(losses, pairs, relative=relative)


def _slope(found: Scope) -> float | None:
    """Return by which fraction the baseline's loss (validation, or else training) falls per unit of ln(tokens)."""
    base = tuple(dict.fromkeys(base for _, base in pairs_of(found)))

    def measured() -> float | None:
        curves = ([line_of(found.results, trial, metric) for trial in base] for metric in (LOSS, "loss"))
        return next((slope for lines in curves if (slope := relative_slope(lines))), None)

    return found.results.remembered(f"slope {' '.join(base)}", measured)
