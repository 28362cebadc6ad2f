"""Get the data of a claim's comparison: choose the sweep, resolve the metric, pair the trials, pool the spread.

Arms are compared in the sweep that the claim's part names. If the part names none, they are compared in the first sweep
that has both arms, or else over all sweeps. The spread, which is the standard deviation over seeds of the relative
differences between two arms, is pooled: it is estimated from more arms, of all sweeps (results/pooling.py). These arms
have the baseline's model, optimizer, schedule and trunk, and their forward passes have the precision of one of the two
compared arms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fewbits.analysis.engine.claims.schema import LOSS, Comparison
from fewbits.analysis.engine.results.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.evaluation import document_error, documents
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Between, Metric, Where, arm_rows, paired, sample
from fewbits.analysis.engine.results.pooling import pools_of, treatments
from fewbits.analysis.engine.results.probes import PREFIX, probe_numbers
from fewbits.analysis.engine.statistics.estimates import Shared
from fewbits.sweeps.planning.plan import Member

LATE = "@late"  # METRIC@late is the mean of METRIC over the last tenth of the steps
# The losses that are also stored for each document: metric → column in evaluation.parquet.
DOCUMENTS = {LOSS: "loss"} | {f"{LOSS}_{form}": f"loss_{form}" for form in ("unquantized", "cast", "narrow")}
LOSSES = ("loss", "loss_max", "ood_loss", *DOCUMENTS)


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
        """True if the metric is a training or evaluation loss (LOSSES), or its mean over the last steps (`@late`)."""
        return self.name.removesuffix(LATE) in LOSSES


def built_in(results: Results, name: str) -> Numbers:
    """Return the metric of this name, for names that are known without a hook of the study (hooks.py).

    name: a column of `results.trials`; a metric with the suffix `@late`, for its mean over the last tenth of the steps;
    or `probe:VARIANT:MEASURE`, for a measure of a recipe of which only some operands are quantized (results/probes.py).
    """
    if name.startswith(PREFIX):
        return Numbers(name, probe_numbers(results, name))
    return Numbers(name, results.late(name.removesuffix(LATE)) if name.endswith(LATE) else name)


def _is_paired(scope: Results, arm: str, baseline: str, where: Where) -> bool:
    """Tell whether the plan has at least one pair: trials of arm and baseline with equal seeds and axis values.

    The axis values have to be equal for all axes that the baseline has. where: axis values of the arm.
    """
    others = arm_rows(scope, baseline, shared=True)
    return any(
        own["seed"] == other["seed"] and set(other["axes"]) <= set(own["axes"])
        for own in arm_rows(scope, arm, where)
        for other in others
    )


def data_of(results: Results, comparison: Comparison, numbers: Callable[[Results, str], Numbers]) -> Measured:
    """Return the data on which a comparison is tested: the differences of pairs of trials, arm minus baseline.

    Relative differences can have a pooled spread (see the module's docstring). For a comparison without a baseline,
    return the arm's own numbers. Return NotPlanned if the plan lacks an arm or has no pair, and NoData if no number is
    available; both contain the reason. numbers: a function (results, name of a metric) → the metric.
    """
    part, arm, baseline, where = comparison.part, comparison.arm, comparison.baseline, comparison.where
    base_where = part.baseline_where
    arms = (arm, baseline) if baseline else (arm,)
    scope = scope_of(results, arms, part.sweep, where, base_where)
    paired_by_axes = bool(baseline) and base_where is None
    if scope is None or (paired_by_axes and not _is_paired(scope, arm, baseline, where)):
        return NotPlanned(f"not run at this scale ({results.scale_name})")
    metric = numbers(scope if part.sweep else results, comparison.metric)
    values, bounds = metric.values, metric.bounds
    if isinstance(values, str) and values not in scope.metrics():
        return NoData(f"no trial has recorded the metric {comparison.metric}")
    if not baseline:
        assert not callable(values)
        own = sample(scope, values, arm, where)
        return replace(own, bounds=bounds) if isinstance(own, Differences) else own
    data = paired(scope, values, arm, baseline, where, baseline_where=base_where, relative=part.relative)
    if isinstance(data, NoData):
        return data
    if not metric.is_loss:  # diverged trials count as evidence only for losses, not for shares or errors
        data = replace(data, diverged=0, baseline_diverged=0)
    if bounds is not None:
        data = replace(data, bounds=bounds if callable(values) else (bounds[0] - bounds[1], bounds[1] - bounds[0]))
    if not any(data.values) or not part.relative or callable(values) or base_where is not None:
        return data
    pools = pools_of(results, scope, values, baseline, where)
    names = [name for one in arms for name in treatments(members_of(scope, one, where))]
    return replace(data, spread=pools.of(*names) if pools else None, shared=_documents(scope, comparison))


def scope_of(
    results: Results, arms: tuple[str, ...], sweep: str = "", where: Where | None = None, base: Where | None = None
) -> Results | None:
    """Return the results of the sweep in which to compare these arms.

    With `sweep`: the results of this sweep; None if it lacks an arm. Without `sweep`: the results of the first sweep
    that has all arms; if no sweep has all arms, those of all sweeps together; None if the plan lacks an arm.
    where: axis values that the first arm needs. base: axis values that the other arms need.
    """
    first, others = arms[0], arms[1:]

    def has_all(scope: Results) -> bool:
        return scope.has(first, where) and all(scope.has(arm, base) for arm in others)

    names = dict.fromkeys(member.cell.sweep for member in results.members)
    for name in names if not sweep else [sweep] if sweep in names else []:
        if has_all(scope := results.of_sweep(name)):
            return scope
    return results if not sweep and has_all(results) else None


def members_of(results: Results, arm: str, where: Where | None = None) -> tuple[Member, ...]:
    """Return the arm's places with the axis values `where`; if no place has them, the arm's places without any axis."""
    axes = set((where or {}).items())
    members = [member for member in results.members if member.cell.arm == arm]
    return tuple(member for member in members if axes <= set(member.cell.axes)) or tuple(
        member for member in members if not member.cell.axes
    )


def _documents(scope: Results, comparison: Comparison) -> Shared | None:
    """Return the standard error of a comparison's mean difference that comes from the choice of evaluated documents.

    Return None if the metric is not a validation loss that is also stored for each document (DOCUMENTS), or if no pair
    of trials has stored losses of at least two documents.
    """
    column = DOCUMENTS.get(comparison.metric)
    frame = scope.remembered("documents", lambda: documents(scope))
    if column is None or frame.empty or column not in frame:
        return None
    ours, base = (
        {m.cell.seed: m.id for m in members_of(scope, arm, comparison.where)}
        for arm in (comparison.arm, comparison.baseline)
    )
    pairs = [(trial, base[seed]) for seed, trial in ours.items() if seed in base]
    return document_error(frame, pairs, relative=comparison.part.relative, column=column)
