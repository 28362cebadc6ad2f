"""From a comparison of a claim to the numbers of its trials: in which sweep, by which metric, with which spread.

Which sweep: the one that the part names, else the first that has both arms, else all of the results. The pooled spread
of a pair is that of all arms of its kinds that start as the baseline does, in whatever sweep they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fewbits.analysis.engine.claims import LOSS, Comparison
from fewbits.analysis.engine.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.evaluation import document_error, documents
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.pairing import Between, Metric, Where, paired, sample
from fewbits.analysis.engine.pooling import pools_of, treatments
from fewbits.analysis.engine.statistics import Shared
from fewbits.sweeps.planning.plan import Member

UNQUANTIZED = "validation_loss_unquantized"  # the same weights, evaluated without quantizers
LATE = "@late"  # of a curve: its mean over the last tenth of the steps
DOCUMENTS = {LOSS: "loss", UNQUANTIZED: "loss_unquantized", "validation_loss_cast": "loss_cast"}  # by document
LOSSES = ("loss", "loss_max", "ood_loss", *DOCUMENTS)


@dataclass(frozen=True)
class Numbers:
    """A metric, resolved: a result's field or numbers by trial, or a function of two trials."""

    name: str
    values: Metric | Between
    bounds: tuple[float, float] | None = None

    @property
    def is_loss(self) -> bool:
        return self.name.removesuffix(LATE) in LOSSES


def built_in(results: Results, name: str) -> Numbers:
    """Return a metric that needs no hook: a field of results, or the late mean of a curve."""
    return Numbers(name, results.late(name.removesuffix(LATE)) if name.endswith(LATE) else name)


def data_of(results: Results, comparison: Comparison, numbers: Callable[[Results, str], Numbers]) -> Measured:
    """Return the data of a comparison of arms. numbers: resolves a metric's name."""
    part, arm, baseline, where = comparison.part, comparison.arm, comparison.baseline, comparison.where
    base_where = part.baseline_where
    arms = (arm, baseline) if baseline else (arm,)
    scope = scope_of(results, arms, part.sweep, where, base_where)
    if scope is None:
        return NotPlanned(f"not run at this scale ({results.scale_name})")
    metric = numbers(scope if part.sweep else results, comparison.metric)
    values, bounds = metric.values, metric.bounds
    if isinstance(values, str) and values not in scope.metrics():
        return NoData(f"no trial has recorded {comparison.metric}")
    if not baseline:
        assert not callable(values)
        found = sample(scope, values, arm, where)
        return replace(found, bounds=bounds) if isinstance(found, Differences) else found
    found = paired(scope, values, arm, baseline, where, baseline_where=base_where, relative=part.relative)
    if isinstance(found, NoData):
        return found
    if not metric.is_loss:  # that a trial diverged says nothing of its shares or errors
        found = replace(found, diverged=0, baseline_diverged=0)
    if bounds is not None:
        found = replace(found, bounds=bounds if callable(values) else (bounds[0] - bounds[1], bounds[1] - bounds[0]))
    if not any(found.values) or not part.relative or callable(values) or base_where is not None:
        return found
    pools = pools_of(results, scope, values, baseline, where)
    names = [name for one in arms for name in treatments(members_of(scope, one, where))]
    return replace(found, spread=pools.of(*names) if pools else None, shared=_documents(scope, comparison))


def scope_of(
    results: Results, arms: tuple[str, ...], sweep: str = "", where: Where | None = None, base: Where | None = None
) -> Results | None:
    """Return the sweep in which these arms are compared; None where this scale has no such sweep."""
    first, others = arms[0], arms[1:]

    def has_all(one: Results) -> bool:
        return one.has(first, where) and all(one.has(arm, base) for arm in others)

    names = dict.fromkeys(member.cell.sweep for member in results.members)
    for name in names if not sweep else [sweep] if sweep in names else []:
        if has_all(one := results.of_sweep(name)):
            return one
    return results if not sweep and has_all(results) else None


def members_of(results: Results, arm: str, where: Where | None = None) -> tuple[Member, ...]:
    """Return an arm's places; those of a baseline that leaves axes out count in all of their values."""
    axes = set((where or {}).items())
    there = [m for m in results.members if m.cell.arm == arm]
    return tuple(m for m in there if axes <= set(m.cell.axes)) or tuple(m for m in there if not m.cell.axes)


def _documents(scope: Results, comparison: Comparison) -> Shared | None:
    """Return the error of the documents that all seeds are evaluated on; None of a metric or run without them."""
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
