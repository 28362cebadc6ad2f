"""Estimate the spread over seeds of relative differences between arms from many arms instead of a single pair.

A spread is a standard deviation. It is pooled over arms that start alike: arms with equal model, optimizer, schedule,
number of steps, trunks and computing environment. They are pooled by kind, that is, by the precision of their forward
passes (`kind`): random differences between runs are larger if the forward pass uses coarser formats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric, Where, number
from fewbits.analysis.engine.results.rows import Row, treatment
from fewbits.analysis.engine.statistics.estimates import Pools, pooled_by_kind
from fewbits.kernels.quantizer import Mixture
from fewbits.models.recipe import EMULATE, Recipe, Slot
from fewbits.sweeps.planning.plan import Member

COARSE = 8  # arms whose forward passes use formats of fewer bits than this have greater spreads: a kind of their own
OUTLIERS = ("bad-arm", "e2m1")  # control arms that are worse on purpose; they are not pooled

Start = tuple[object, ...]  # the properties that are equal for arms that start alike, as `_start` returns them


def pools_of(results: Results, scope: Results, metric: Metric, baseline: str, where: Where) -> Pools | None:
    """Return pools of arms whose trials differ from the baseline's only in the recipe; a pool's arms share one spread.

    Each pool has arms whose forward passes have the same precision (`kind`). A trial in `results` is used if it has the
    axis values `where`, and if one of the baseline's trials in `scope` (`results` or a part of it) has the same seed,
    model, optimizer, schedule, number of steps, trunk and environment. The spread is that of the logarithm of `metric`.
    Return None if there are fewer than two seeds, or if no pool would have two arms.
    """
    key = metric if isinstance(metric, str) else str(sorted(metric.items()))
    starts = {_start(results, row) for row in scope.rows if row["arm"] == baseline}
    name = f"pools {key} {sorted(where.items())} {sorted(map(str, starts))}"
    return results.remembered(name, lambda: _pools(results, starts, metric, where))


def treatments(members: Iterable[Member]) -> list[str]:
    """Return for each place the name of its arm in a pool (arms whose spread is estimated together).

    The name is `SWEEP/ARM, AXIS VALUE`, because each value of an axis counts as an arm of its own.
    """
    return [f"{member.cell.sweep}/{treatment(member.cell.arm, member.cell.axes)}" for member in members]


def _pools(results: Results, starts: set[Start], metric: Metric, where: Where) -> Pools | None:
    logs: dict[str, dict[int, float]] = {}
    kinds: dict[str, str] = {}
    for row in results.rows:
        if row["arm"] in OUTLIERS or len(row["computed"]) > 1 or not set(where.items()) <= set(row["axes"]):
            continue
        value = number(results, row, metric)
        if _start(results, row) in starts and isinstance(value, float) and value > 0:
            name = f"{row['sweep']}/{treatment(row['arm'], row['axes'])}"
            logs.setdefault(name, {})[row["seed"]] = math.log(value)
            kinds[name] = kind(results.plan.trials[row["id"]].trial.recipe)
    sets = Counter(frozenset(one) for one in logs.values())
    # Pooling needs equal seeds: take the largest set of seeds that an arm has; of equally large sets, the commonest.
    seeds = max(sets, key=lambda one: (len(one), sets[one]), default=frozenset())
    complete = {name: [one[seed] for seed in sorted(seeds)] for name, one in logs.items() if one.keys() == seeds}
    return pooled_by_kind(complete, kinds) if len(seeds) > 1 else None


def _start(results: Results, row: Row) -> Start:
    planned = results.plan.trials[row["id"]]
    trained = (planned.trial.optimizer, planned.trial.schedule, planned.parent)
    return row["seed"], row["model"], row["steps"], row["computed"], *trained


def kind(recipe: Recipe) -> str:
    """Return the kind of an arm for pooling, as text.

    Arms with sampled weights are one kind, arms with products executed in FP8 another. All other arms are of two kinds:
    the coarsest format of the forward GEMMs' operands has at least COARSE bits, or fewer.
    """
    if recipe.sampler.kind != "none":
        return "sampled weights"
    if recipe.execute != EMULATE:
        return "products in FP8"
    forward = min(_bits(recipe.operands["fprop.x"]), _bits(recipe.operands["fprop.w"]))
    return f"{COARSE} bits or more forward" if forward >= COARSE else f"fewer than {COARSE} bits forward"


def _bits(slot: Slot) -> float:
    """Return the number of bits of the coarsest format that the operand slot may use; infinity if it has no format."""
    if slot.spec is None:
        return math.inf
    return min(q.format.bits for q in (slot.spec.quantizers if isinstance(slot.spec, Mixture) else (slot.spec,)))
