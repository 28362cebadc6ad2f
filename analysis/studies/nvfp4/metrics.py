"""Numbers of NVFP4's trials that claims compare: costs over BF16, what a switch recovers, where gradients err."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from fewbits.analysis.engine.data import Measured, NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import Between, measure, metric
from fewbits.analysis.engine.pairing import combined, paired
from fewbits.analysis.engine.pairs import scope_of

LOSS = "validation_loss"
SWEEP = "switch"  # of N1
BASELINE, TRUNK, ARM, LONG = "bf16", "trunk", "nvfp4-trunk", "nvfp4-long"
LAST_PART = 5  # the last fifth of the blocks: as many as four are of the paper's twenty
ERROR = "gradient_error"


@metric("nvfp4", "cost_ratio")
def cost_ratio(results: Results) -> Between:
    """Return how much more the first trial costs over BF16 of its seed than the second does."""
    losses, base = _losses(results), _same_seed(results, BASELINE)

    def ratio(ours: str, baseline: str) -> float | None:
        bf16 = losses.get(base.get(baseline, ""))
        if bf16 is None or not {ours, baseline} <= set(losses) or losses[baseline] <= bf16:
            return None
        return (losses[ours] - bf16) / (losses[baseline] - bf16)

    return ratio


@metric("nvfp4", "recovered")
def recovered(results: Results) -> Between:
    """Return the first trial's gain over the second's loss, as a share of what switching both passes gains."""
    losses, both = _losses(results), _same_seed(results, "switch-both")

    def share(ours: str, baseline: str) -> float | None:
        restored = losses.get(both.get(baseline, ""))
        if restored is None or not {ours, baseline} <= set(losses) or losses[baseline] <= restored:
            return None
        return (losses[baseline] - losses[ours]) / (losses[baseline] - restored)

    return share


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return how far the last fifth of the blocks lies above the others: relative errors of weight gradients."""
    numerics = results.numerics()
    if numerics.empty or ERROR not in numerics:
        return {}
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    rows = rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
    found = {}
    for trial, errors in rows.groupby(["id", "block"])[ERROR].mean().groupby(level="id"):
        values = errors.droplevel("id").sort_index().tolist()
        last = max(1, round(len(values) / LAST_PART))
        if len(values) > last:
            found[str(trial)] = fmean(values[-last:]) - fmean(values[:-last])
    return found


@measure("nvfp4", "N1")
def before_and_after_the_decay(results: Results) -> Mapping[str, Measured]:
    """Return the gap to BF16 before the decay, where a run that left BF16 on the way is beside the trunk after as many
    tokens, and how much wider it is at the end."""
    scope = scope_of(results, (ARM, TRUNK, LONG, BASELINE), SWEEP)
    if scope is None:
        missing = NotPlanned(f"not run at this scale ({results.scale_name})")
        return {"stable": missing, "widening": missing}
    before = _losses_before(scope)

    def gap(ours: str, trunk: str) -> float | None:
        return before[ours] / before[trunk] - 1 if {ours, trunk} <= set(before) else None

    arms = [(SWEEP, arm) for arm in (LONG, BASELINE, ARM, TRUNK)]
    return {
        "stable": paired(scope, gap, ARM, TRUNK),
        "widening": combined(
            scope, arms, lambda end, bf16, ours, trunk: end / bf16 - ours / trunk, _losses(scope) | before
        ),
    }


def _losses_before(scope: Results) -> dict[str, float]:
    """Return the loss at the end of the runs that left BF16 before the decay, and the trunk's after as many tokens."""
    curves = scope.curves(LOSS).drop_duplicates(["id", "tokens"])
    ours = curves[curves["arm"] == ARM]
    ends = ours[ours["step"] == ours.groupby("id")["step"].transform("max")]
    trunks = curves[curves["arm"] == TRUNK].merge(ends[["seed", "tokens"]], on=["seed", "tokens"])
    rows = pd.concat([ends, trunks])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}


def _losses(results: Results) -> dict[str, float]:
    if LOSS not in results.trials:
        return {}
    done = results.trials[results.trials["state"] == "done"].dropna(subset=[LOSS])
    return {str(trial): float(value) for trial, value in zip(done["id"], done[LOSS], strict=True)}


def _same_seed(results: Results, arm: str) -> dict[str, str]:
    """Return, for each trial, the trial of this arm in its sweep and seed."""
    there = {(m.cell.sweep, m.cell.seed): m.id for m in results.members if m.cell.arm == arm}
    return {m.id: there[m.cell.sweep, m.cell.seed] for m in results.members if (m.cell.sweep, m.cell.seed) in there}
