"""Get the data of a claim's comparison: choose the sweep, resolve the metric, pair the trials, pool the spread.

Arms are compared in the sweep that the part names, else in the first sweep that has both arms, else over all sweeps.
The pooled spread is that of all arms of the same kinds that start as the baseline does, in any sweep.
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

LATE = "@late"  # the end of a metric's name that stands for a curve's mean over the last tenth of the steps
# The losses that are also known by document, with their columns in evaluation.parquet.
DOCUMENTS = {LOSS: "loss"} | {f"{LOSS}_{form}": f"loss_{form}" for form in ("unquantized", "cast", "narrow")}
LOSSES = ("loss", "loss_max", "ood_loss", *DOCUMENTS)


@dataclass(frozen=True)
class Numbers:
    """A metric with its values: the name of a field of the results, numbers by trial, or a function of two trials."""

    name: str
    values: Metric | Between
    bounds: tuple[float, float] | None = None

    @property
    def is_loss(self) -> bool:
        return self.name.removesuffix(LATE) in LOSSES


def built_in(results: Results, name: str) -> Numbers:
    """Return a metric that needs no hook: a field of the results, a curve's mean over the last steps, or a probe's."""
    if name.startswith(PREFIX):
        return Numbers(name, probe_numbers(results, name))
    return Numbers(name, results.late(name.removesuffix(LATE)) if name.endswith(LATE) else name)


def _is_paired(scope: Results, arm: str, baseline: str, where: Where) -> bool:
    """Tell whether the plan has a trial of the baseline with the seed and the axis values of one of the arm's."""
    others = arm_rows(scope, baseline, shared=True)
    return any(
        own["seed"] == other["seed"] and set(other["axes"]) <= set(own["axes"])
        for own in arm_rows(scope, arm, where)
        for other in others
    )


def data_of(results: Results, comparison: Comparison, numbers: Callable[[Results, str], Numbers]) -> Measured:
    """Return the data of a comparison of arms. numbers: the function that resolves a metric's name."""
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
        return NoData(f"no trial has recorded {comparison.metric}")
    if not baseline:
        assert not callable(values)
        own = sample(scope, values, arm, where)
        return replace(own, bounds=bounds) if isinstance(own, Differences) else own
    data = paired(scope, values, arm, baseline, where, baseline_where=base_where, relative=part.relative)
    if isinstance(data, NoData):
        return data
    if not metric.is_loss:  # divergence is a statement about the loss, not about shares or errors
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
    """Return the results in which to compare these arms: of one sweep, or all; None if the plan lacks one of the arms.

    sweep: the sweep to use. where: axis values of the first arm; base: those of the others.
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
    """Return the places of an arm with these axis values or, if there are none, its places without axes."""
    axes = set((where or {}).items())
    members = [member for member in results.members if member.cell.arm == arm]
    return tuple(member for member in members if axes <= set(member.cell.axes)) or tuple(
        member for member in members if not member.cell.axes
    )


def _documents(scope: Results, comparison: Comparison) -> Shared | None:
    """Return the error from the choice of documents; None for metrics and runs without losses by document."""
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
