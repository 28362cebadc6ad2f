"""Get the data of a claim's comparison: choose the sweep, resolve the metric, pair the trials, add known errors.

Arms are compared in the first of the part's sweeps that has all of them. If the part names no sweep, they are compared
in the first sweep that has them, or else over all sweeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fewbits.analysis.engine.claims.schema import DIVERGED, EVENTS, LOSS, PROBES, Comparison
from fewbits.analysis.engine.results.data import Differences, Events, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.evaluation import document_error, documents
from fewbits.analysis.engine.results.frames import SCORES, Results
from fewbits.analysis.engine.results.pairing import Between, Metric, Where, arm_rows, combined, line_of, paired, sample
from fewbits.analysis.engine.results.probes import PREFIX, probe_numbers
from fewbits.analysis.engine.results.scores import RECENT
from fewbits.analysis.engine.statistics.estimates import Error
from fewbits.analysis.engine.statistics.tokens import relative_slope
from fewbits.sweeps.planning.store import OVER, State

LATE = "@late"  # METRIC@late is the mean of METRIC over the last tenth of the steps
BEST = "@best"  # METRIC@best is its greatest value over the last RECENT checkpoints that were evaluated
TASKS = "tasks."  # the start of the names of downstream scores, for example tasks.piqa.acc,none
QUESTIONS = 1000.0  # degrees of freedom of a score's standard error
AGAIN = "-again"  # the arm ARM-again is like ARM, but its sums are rounded in another order
PROBE, END = "probe-", {"checkpoint": "end"}  # the names of probes of an arm, and the trunk's last checkpoint
# The losses that are also stored for each document: metric → column in evaluation.parquet.
DOCUMENTS = {LOSS: "loss"} | {f"{LOSS}_{form}": f"loss_{form}" for form in ("unquantized", "cast", "narrow")}


@dataclass(frozen=True)
class Numbers:
    """A metric with its name and values.

    values: a column of `Results.trials`, a mapping from trial id to number, or a function of two trial ids (the arm's
    and the baseline's) that returns their difference. bounds: the limits of a value, for example (0, 1) for a share.
    """

    name: str
    values: Metric | Between
    bounds: tuple[float, float] | None = None

    @property
    def is_loss(self) -> bool:
        """True if the metric is a loss of training or evaluation, by its name."""
        return "loss" in self.name


def built_in(results: Results, name: str) -> Numbers:
    """Return the metric of this name, for names that are known without a hook of the study (hooks.py).

    name: a column of `results.trials`, also with the suffixes LATE and BEST; or `probe:VARIANT:MEASURE`, for a measure
    of a recipe of which only some operands are quantized (results/probes.py).
    """
    if name.startswith(PREFIX):
        return Numbers(name, probe_numbers(results, name))
    if name.endswith(BEST):
        frame = results.table_of(SCORES)
        own = frame[frame["name"] == name.removesuffix(BEST)] if len(frame) else frame
        groups = own.drop_duplicates(["id", "step"]).sort_values("step").groupby("id") if len(own) else ()
        return Numbers(name, {str(trial): float(rows["value"].tail(RECENT).max()) for trial, rows in groups})
    return Numbers(name, results.late(name.removesuffix(LATE)) if name.endswith(LATE) else name)


# -------------------------------------------------------------------------------- where


@dataclass(frozen=True)
class Scope:
    """The results in which arms are compared, with the arms' names there and the axis values of arm and baseline."""

    results: Results
    arms: tuple[str, ...]
    where: Where
    base: Where | None


def scope_of(
    results: Results,
    arms: Sequence[str],
    sweeps: Sequence[str] = (),
    where: Where | None = None,
    base: Where | None = None,
) -> Scope | None:
    """Return where to compare these arms (see schema.py); None if the plan lacks one of them.

    where: axis values that the first arm needs. base: axis values that the other arms need; None: those of the arm,
    as far as the other arms have these axes.
    """
    planned = dict.fromkeys(member.cell.sweep for member in results.members)
    for name in sweeps or planned:
        if name not in planned:
            continue
        part, probed = results.of_sweep(name), name == PROBES and bool(sweeps)
        if probed and len(sweeps) > 1 and not _has_trunk(part):
            continue
        end = END if probed else {}
        other = None if base is None else {**end, **base}
        if found := _found(part, arms, {**end, **(where or {})}, other, PROBE if probed else ""):
            return found
    return None if sweeps else _found(results, arms, where or {}, base, "")


def _found(scope: Results, arms: Sequence[str], where: Where, base: Where | None, prefix: str) -> Scope | None:
    named = [[one if one.startswith(prefix) else prefix + one for one in arm.split("|")] for arm in arms]
    for choice in range(max(map(len, named))):
        names = tuple(alike[min(choice, len(alike) - 1)] for alike in named)
        if all(scope.has(name, base if place else where) for place, name in enumerate(names)):
            return Scope(scope, names, where, base)
    return None


def _has_trunk(scope: Results) -> bool:
    parents = {scope.plan.trials[member.id].parent for member in scope.members}
    return any(parent in scope.plan.trials for parent in parents if parent is not None)


def pairs_of(found: Scope) -> list[tuple[str, str]]:
    """Return (trial of the arm, trial of the baseline) for each pair in the plan.

    The two have equal seeds and, unless the baseline has axis values of its own, equal values of all axes that the
    baseline has.
    """
    (arm, baseline), members = found.arms, found.results.members
    where, base = set(found.where.items()), set((found.base or {}).items())
    pairs = {
        (own.id, other.id)
        for own in members
        if own.cell.arm == arm and where <= set(own.cell.axes)
        for other in members
        if other.cell.arm == baseline
        and other.cell.seed == own.cell.seed
        and (base if found.base is not None else set()) <= set(other.cell.axes)
        and (found.base is not None or set(other.cell.axes) <= set(own.cell.axes))
    }
    return sorted(pairs)


# -------------------------------------------------------------------------------- data


def data_of(results: Results, comparison: Comparison, numbers: Callable[[Results, str], Numbers]) -> Measured:
    """Return the data on which a comparison is tested: the differences of pairs of trials, arm minus baseline.

    For a comparison without a baseline, return the arm's own numbers. Return NotPlanned if the plan lacks an arm or has
    no pair, and NoData if no number is available. numbers: a function (results, name of a metric) → the metric.
    """
    part, compared = comparison.part, [one for one in (comparison.arm, comparison.baseline) if one]
    found = scope_of(results, compared, part.sweep, part.where, part.baseline_where)
    if found is None or (len(compared) == 2 and not pairs_of(found)):
        return NotPlanned(f"not run at this scale ({results.scale_name})")
    scope, arm, where = found.results, found.arms[0], found.where
    if comparison.metric == DIVERGED or part.test in EVENTS:
        return _divergence(found)
    metric = numbers(scope if part.sweep else results, comparison.metric)
    values, bounds = metric.values, metric.bounds
    if isinstance(values, str) and values not in scope.metrics():
        ids = [row["id"] for name in found.arms for row in arm_rows(scope, name, shared=True)]
        return NoData(f"no trial has recorded the metric {comparison.metric}", tuple(dict.fromkeys(ids)))
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
    """Return a number that is computed from the losses of several arms, such as a ratio of two loss increases.

    arms: name → (sweeps, arm, metric); the first of the sweeps counts that the scale has. combine: a function of {name:
    number}. The numbers of the seeds are those of `combined`; with one seed, the error follows from A/A comparisons.
    """
    planned = {member.cell.sweep for member in results.members}
    chosen = {
        name: (next((sweep for sweep in sweeps if sweep in planned), sweeps[0]), arm, metric)
        for name, (sweeps, arm, metric) in arms.items()
    }
    return combined(results, chosen, combine, relative=relative, noise=again_noise(results, results, LOSS, True))


def _divergence(found: Scope) -> Events | NoData:
    """Return how many of the finished trials of arm and baseline diverged."""
    base_where = found.where if found.base is None else found.base
    counts: list[int] = []
    ids: list[str] = []
    for arm, where in zip(found.arms, (found.where, base_where), strict=True):
        over = [row for row in arm_rows(found.results, arm, where, shared=True) if row["state"] in OVER]
        counts += [sum(row["state"] == State.DIVERGED for row in over), len(over)]
        ids += [row["id"] for row in over]
    ours, of, base, base_of = counts
    if not of or not base_of:
        return NoData("an arm has no finished trial", tuple(ids))
    return Events(ours, of, base, base_of, tuple(ids))


def again_noise(results: Results, scope: Results, metric: Metric, relative: bool) -> Error | None:
    """Return the error of one pair's difference, from A/A comparisons: an arm twice, with its sums in another order.

    They are those of the same sweep or, if it has none, of all sweeps at this scale. None if there is none.
    """
    key = metric if isinstance(metric, str) else str(sorted(metric.items()))
    for among in (scope, results):
        names = "+".join(dict.fromkeys(member.cell.sweep for member in among.members))
        found = results.remembered(f"A/A {names} {key} {relative}", partial(_again, among, metric, relative))
        if found:
            return Error(math.sqrt(sum(value**2 for value in found) / len(found)), len(found))
    return None


def _again(results: Results, metric: Metric, relative: bool) -> list[float]:
    found: list[float] = []
    places = dict.fromkeys((m.cell.sweep, str(m.cell.arm), m.cell.axes) for m in results.members)
    for sweep, arm, axes in places:
        scope, base = results.of_sweep(sweep), arm.removesuffix(AGAIN)
        known = not isinstance(metric, str) or metric in scope.metrics()
        if arm.endswith(AGAIN) and scope.has(base, dict(axes)) and known:
            data = paired(scope, metric, arm, base, dict(axes), relative=relative)
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
    column = DOCUMENTS.get(comparison.metric)
    frame = found.results.remembered("documents", lambda: documents(found.results))
    if column is None or frame.empty or column not in frame:
        return None
    return document_error(frame, pairs, relative=relative, column=column)


def _slope(found: Scope) -> float | None:
    """Return the fraction by which the baseline's loss falls for each unit of ln(tokens) at its end.

    The loss is that of validation or, if there are too few evaluations, that of training.
    """
    base = tuple(dict.fromkeys(base for _, base in pairs_of(found)))

    def measured() -> float | None:
        curves = ([line_of(found.results, trial, metric) for trial in base] for metric in (LOSS, "loss"))
        return next((slope for lines in curves if (slope := relative_slope(lines))), None)

    return found.results.remembered(f"slope {' '.join(base)}", measured)
