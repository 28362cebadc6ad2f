"""Pairs: from a comparison of a claim to the numbers of its trials, seed by seed.

Which sweep: the one that the part names, else the first that has both arms, else all of the results. The pooled spread
of a pair is that of all arms of its kinds that start as the baseline does, in whatever sweep they stand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fewbits.analysis.engine.alike import why_not_compared
from fewbits.analysis.engine.claims import LOSS, Comparison
from fewbits.analysis.engine.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.evaluation import document_error, documents, mean_losses
from fewbits.analysis.engine.frames import Metric, Results, Row, kind, treatment
from fewbits.analysis.engine.statistics import Pools, Shared, differences, pooled_by_kind
from fewbits.sweeps.planning.plan import Member
from fewbits.sweeps.running.machine_kinds import is_mixed
from fewbits.sweeps.running.store import OVER, State

LOSS_BF16 = "validation_loss@bf16"  # the same weights evaluated in BF16
LATE = "@late"  # of a curve: its mean over the last tenth of the steps
LOSSES = ("loss", "loss_max", "validation_loss", "ood_loss", LOSS_BF16)
OUTLIERS = ("bad-arm",)  # controls that are worse on purpose: no part of a pool
Where = Mapping[str, str]


@dataclass(frozen=True)
class Numbers:
    """A metric, resolved: a result's field or numbers by trial, or a function of two trials."""

    name: str
    of_trials: Metric | None = None
    of_pairs: Callable[[str, str], float | None] | None = None
    bounds: tuple[float, float] | None = None

    @property
    def is_loss(self) -> bool:
        return self.name.removesuffix(LATE) in LOSSES


def built_in(results: Results, name: str) -> Numbers:
    """Return a metric that needs no hook: a field of results, the late mean of a curve, or the loss in BF16."""
    if name == LOSS_BF16:
        return Numbers(name, results.remembered(name, lambda: mean_losses(documents(results))))
    if name.endswith(LATE):
        return Numbers(name, results.late(name.removesuffix(LATE)))
    return Numbers(name, name)


def data_of(results: Results, comparison: Comparison, numbers: Callable[[Results, str], Numbers]) -> Measured:
    """Return the data of a comparison of arms. numbers: resolves a metric's name."""
    part, arm, baseline = comparison.part, comparison.arm, comparison.baseline
    arms = (arm, baseline) if baseline else (arm,)
    base_where = part.baseline_where
    scope = scope_of(results, arms, part.sweep, comparison.where, base_where)
    if scope is None:
        return NotPlanned(f"not run at this scale ({results.scale_name})")
    metric = numbers(scope if part.sweep else results, comparison.metric)
    if metric.of_trials is not None and isinstance(metric.of_trials, str) and metric.of_trials not in scope.metrics():
        return NoData(f"no trial has recorded {comparison.metric}")
    if comparison.metric == LOSS_BF16 and not metric.of_trials:
        return NoData("no trial was evaluated by document in BF16")
    if not baseline:
        assert metric.of_trials is not None
        found = scope.sample(metric.of_trials, arm, comparison.where)
        return replace(found, bounds=metric.bounds) if isinstance(found, Differences) else found
    relative = part.relative
    if base_where is not None:
        assert metric.of_trials is not None
        found = across(scope, metric.of_trials, (arm, comparison.where), (baseline, base_where), relative=relative)
    elif metric.of_pairs is not None:
        found = scope.distances(metric.of_pairs, arm, baseline, comparison.where, relative=relative)
    else:
        assert metric.of_trials is not None
        found = scope.paired(metric.of_trials, arm, baseline, comparison.where, relative=relative)
    if isinstance(found, NoData):
        return found
    if not metric.is_loss:  # that a trial diverged says nothing of its shares or errors
        found = replace(found, diverged=0, baseline_diverged=0)
    if metric.bounds is not None:
        low, high = metric.bounds
        found = replace(found, bounds=metric.bounds if metric.of_pairs else (low - high, high - low))
    if not any(found.values) or not relative or metric.of_trials is None or base_where is not None:
        return found
    pools = pools_of(results, scope, metric.of_trials, baseline, comparison.where)
    names = [_treatment(m) for a in arms for m in members_of(scope, a, comparison.where)]
    return replace(
        found,
        spread=pools.of(*names) if pools else None,
        shared=_documents(scope, comparison) if comparison.metric in (LOSS, LOSS_BF16) else None,
    )


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


def across(
    results: Results, metric: Metric, ours: tuple[str, Where], baseline: tuple[str, Where], *, relative: bool
) -> Differences | NoData:
    """Return differences by seed of two combinations of axes, which share initial weights and not always data."""
    rows = {row["id"]: row for row in results.rows}
    left, right = ({m.cell.seed: m.id for m in members_of(results, *one)} for one in (ours, baseline))
    values, notes = [], []
    for seed in left:
        pair = [rows[i] for i in (left[seed], right.get(seed)) if i is not None and rows[i]["state"] in OVER]
        found = [value for row in pair if (value := _number(row, metric)) is not None]
        if len(pair) == 2 and (
            unlike := why_not_compared(pair[0], (ours[0], baseline[0]), pair[1], results.usual_kind)
        ):
            notes.append(unlike)
        elif len(found) == 2:
            values += differences(found[:1], found[1:], relative=relative).tolist()
        else:
            notes.append(f"{ours[0]} and {baseline[0]}, seed {seed}: not both done")
    trials = tuple(dict.fromkeys([*left.values(), *right.values()]))
    return Differences(tuple(values), relative, trials, tuple(notes)) if values else NoData("; ".join(notes), trials)


def _number(row: Row, metric: Metric) -> float | None:
    if row["state"] != State.DONE:
        return None
    value = row.get(metric) if isinstance(metric, str) else metric.get(row["id"])
    return None if value is None or math.isnan(value) else float(value)


# -------------------------------------------------------------------------------- pooled spreads


def pools_of(results: Results, scope: Results, metric: Metric, baseline: str, where: Where) -> Pools | None:
    """Return the spread of relative differences over all arms that start as the baseline of this scope does: as long,
    at the same rates, of the same model, from the same parents; each kind of arms by itself."""
    key = metric if isinstance(metric, str) else str(sorted(metric.items()))
    sweeps = sorted({member.cell.sweep for member in scope.members})
    name = f"pools {key} {baseline} {sorted(where.items())} {sweeps}"
    return results.remembered(name, lambda: _pools(results, scope, metric, baseline, where))


def _pools(results: Results, scope: Results, metric: Metric, baseline: str, where: Where) -> Pools | None:
    starts = {_start(results, row) for row in scope.rows if row["arm"] == baseline}
    logs: dict[str, dict[int, float]] = {}
    kinds: dict[str, str] = {}
    for row in results.rows:
        value = _number(row, metric)
        if row["arm"] in OUTLIERS or is_mixed(row["computed"]) or not set(where.items()) <= set(row["axes"]):
            continue
        if _start(results, row) in starts and value is not None and value > 0:
            name = f"{row['sweep']}/{treatment(row['arm'], row['axes'])}"
            logs.setdefault(name, {})[row["seed"]] = math.log(value)
            kinds[name] = kind(results.plan.trials[row["id"]].trial.recipe)
    sets = Counter(frozenset(one) for one in logs.values())
    seeds = max(sets, key=lambda one: (len(one), sets[one]), default=frozenset())  # most, and of most arms
    whole = {name: [one[seed] for seed in sorted(seeds)] for name, one in logs.items() if one.keys() == seeds}
    return pooled_by_kind(whole, kinds) if len(seeds) > 1 else None


def _start(results: Results, row: Row) -> tuple[object, ...]:
    planned = results.plan.trials[row["id"]]
    trained = (planned.trial.optimizer, planned.trial.schedule, planned.parent)
    return row["seed"], row["model"], row["steps"], row["computed"], *trained


def _treatment(member: Member) -> str:
    return f"{member.cell.sweep}/{treatment(member.cell.arm, member.cell.axes)}"


def _documents(scope: Results, comparison: Comparison) -> Shared | None:
    frame = scope.remembered("documents", lambda: documents(scope))
    if frame.empty:
        return None
    ours = {m.cell.seed: m.id for m in members_of(scope, comparison.arm, comparison.where)}
    base = {m.cell.seed: m.id for m in members_of(scope, comparison.baseline, comparison.where)}
    pairs = [(trial, base[seed]) for seed, trial in ours.items() if seed in base]
    column = "loss" if comparison.metric == LOSS else "loss_bf16"
    return document_error(frame, pairs, relative=comparison.part.relative, column=column)
