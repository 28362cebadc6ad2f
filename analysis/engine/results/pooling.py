"""Pool the spread over seeds of relative differences between arms that start alike.

Arms start alike if they have the same model, optimizer, schedule, number of steps, trunks and kind of machine. Only
arms of one kind are pooled, since chance moves a run further, the coarser the formats in its forward passes.
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
from fewbits.sweeps.running.machine_kinds import is_mixed

COARSE = 8  # the number of bits that separates two kinds of arms: with fewer, arms spread further
OUTLIERS = ("bad-arm",)  # control arms that are worse on purpose, and are not pooled

Start = tuple[object, ...]  # what arms that start alike share


def pools_of(results: Results, scope: Results, metric: Metric, baseline: str, where: Where) -> Pools | None:
    """Return a pool for each kind, from the arms in all results that start as the baseline does in `scope`.

    Return None if there are fewer than two seeds.
    """
    key = metric if isinstance(metric, str) else str(sorted(metric.items()))
    starts = {_start(results, row) for row in scope.rows if row["arm"] == baseline}
    name = f"pools {key} {sorted(where.items())} {sorted(map(str, starts))}"
    return results.remembered(name, lambda: _pools(results, starts, metric, where))


def treatments(members: Iterable[Member]) -> list[str]:
    """Return the names by which a pool knows the arms of these places."""
    return [f"{member.cell.sweep}/{treatment(member.cell.arm, member.cell.axes)}" for member in members]


def _pools(results: Results, starts: set[Start], metric: Metric, where: Where) -> Pools | None:
    logs: dict[str, dict[int, float]] = {}
    kinds: dict[str, str] = {}
    for row in results.rows:
        if row["arm"] in OUTLIERS or is_mixed(row["computed"]) or not set(where.items()) <= set(row["axes"]):
            continue
        value = number(results, row, metric)
        if _start(results, row) in starts and isinstance(value, float) and value > 0:
            name = f"{row['sweep']}/{treatment(row['arm'], row['axes'])}"
            logs.setdefault(name, {})[row["seed"]] = math.log(value)
            kinds[name] = kind(results.plan.trials[row["id"]].trial.recipe)
    sets = Counter(frozenset(one) for one in logs.values())
    # The largest set of seeds and, of several, the one that most arms have.
    seeds = max(sets, key=lambda one: (len(one), sets[one]), default=frozenset())
    complete = {name: [one[seed] for seed in sorted(seeds)] for name, one in logs.items() if one.keys() == seeds}
    return pooled_by_kind(complete, kinds) if len(seeds) > 1 else None


def _start(results: Results, row: Row) -> Start:
    planned = results.plan.trials[row["id"]]
    trained = (planned.trial.optimizer, planned.trial.schedule, planned.parent)
    return row["seed"], row["model"], row["steps"], row["computed"], *trained


def kind(recipe: Recipe) -> str:
    """Return the kind of an arm: the formats that its forward passes read, and whether products are executed."""
    if recipe.sampler.kind != "none":
        return "sampled weights"
    if recipe.execute != EMULATE:
        return "products in FP8"
    forward = min(_bits(recipe.operands["fprop.x"]), _bits(recipe.operands["fprop.w"]))
    return f"{COARSE} bits or more forward" if forward >= COARSE else f"fewer than {COARSE} bits forward"


def _bits(slot: Slot) -> float:
    """Return the bits of the coarsest format that the operand slot may use; infinity if it is not quantized."""
    if slot.spec is None:
        return math.inf
    return min(q.format.bits for q in (slot.spec.quantizers if isinstance(slot.spec, Mixture) else (slot.spec,)))
