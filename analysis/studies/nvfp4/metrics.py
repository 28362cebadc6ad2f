"""Numbers of NVFP4's trials that claims compare: costs over BF16, what a switch recovers, where gradients err."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from fewbits.analysis.engine.data import Differences, Measured, NoData
from fewbits.analysis.engine.frames import Results, last_windows
from fewbits.analysis.engine.hooks import Between, measure, metric
from fewbits.analysis.engine.pairs import scope_of
from fewbits.analysis.engine.places import not_planned, trial_ids

LOSS = "validation_loss"
BASELINE, TRUNK, ARM, LONG = "bf16", "trunk", "nvfp4-trunk", "nvfp4-long"
LAST_PART = 5  # the last fifth of the blocks: as many as four are of the paper's twenty
ERROR = "gradient_error"


@metric("nvfp4", "cost_ratio")
def cost_ratio(results: Results) -> Between:
    """Return how much more the first trial costs over BF16 of its seed than the second does."""
    losses, base = results.numbers(LOSS), _same_seed(results, BASELINE)

    def ratio(ours: str, baseline: str) -> float | None:
        bf16 = losses.get(base.get(baseline, ""))
        if bf16 is None or not {ours, baseline} <= set(losses) or losses[baseline] <= bf16:
            return None
        return (losses[ours] - bf16) / (losses[baseline] - bf16)

    return ratio


@metric("nvfp4", "recovered")
def recovered(results: Results) -> Between:
    """Return the first trial's gain over the second's loss, as a share of what switching both passes gains."""
    losses, both = results.numbers(LOSS), _same_seed(results, "switch-both")

    def share(ours: str, baseline: str) -> float | None:
        restored = losses.get(both.get(baseline, ""))
        if restored is None or not {ours, baseline} <= set(losses) or losses[baseline] <= restored:
            return None
        return (losses[baseline] - losses[ours]) / (losses[baseline] - restored)

    return share


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return how far the last fifth of the blocks lies above the others: relative errors of weight gradients."""
    found = {}
    for trial, blocks in errors_by_block(results).items():
        values = [blocks[block] for block in sorted(blocks)]
        last = max(1, round(len(values) / LAST_PART))
        if len(values) > last:
            found[trial] = fmean(values[-last:]) - fmean(values[:-last])
    return found


def gradient_errors(results: Results) -> pd.DataFrame:
    """Return a row for each linear layer, of each trial's last window in which its gradients were measured.

    The error is the norm of the gradient's error over that of the gradient, with one layer's own operands quantized and
    not: Wgrad's output from its inputs being in few bits, in the paper's words. Blocks are counted from 1.
    """
    numerics, columns = results.numerics(), ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    return last_windows(rows).assign(block=lambda last: last["block"] + 1)[columns]


def errors_by_block(results: Results, part: str | None = None) -> dict[str, dict[int, float]]:
    """Return each trial's errors by block: means over its linear layers, or over one kind of them."""
    rows = results.remembered("gradient errors", lambda: gradient_errors(results))
    means = (rows if part is None else rows[rows["part"] == part]).groupby(["id", "block"])[ERROR].mean().reset_index()
    return {
        str(trial): dict(zip(of["block"].astype(int), of[ERROR].astype(float), strict=True))
        for trial, of in means.groupby("id")
    }


@measure("nvfp4", "N1")
def before_and_after_the_decay(results: Results) -> Mapping[str, Measured]:
    """Return the gap to BF16 before the decay, where a run that left BF16 on the way is beside the trunk after as many
    tokens, and how much wider it is at the end."""
    scope = scope_of(results, (ARM, TRUNK, LONG, BASELINE), "switch")
    if scope is None:
        return dict.fromkeys(("stable", "widening"), not_planned(results))
    stable = _gaps_before(scope)
    losses, arms = scope.numbers(LOSS), {arm: trial_ids(scope, arm) for arm in (ARM, LONG, BASELINE)}
    after = {
        seed: losses[trial] / losses[arms[BASELINE][seed]] - 1
        for seed, trial in arms[LONG].items()
        if trial in losses and arms[BASELINE].get(seed) in losses
    }
    trials = tuple(trial for one in arms.values() for trial in one.values())
    both = [seed for seed in after if seed in stable]
    if not both:
        return dict.fromkeys(("stable", "widening"), NoData("no seed has ended before and after the decay", trials))
    return {
        "stable": Differences(tuple(stable.values()), True, trials),
        "widening": Differences(tuple(after[seed] - stable[seed] for seed in both), True, trials),
    }


def _gaps_before(scope: Results) -> dict[int, float]:
    curves = scope.curves(LOSS).drop_duplicates(["id", "tokens"])
    ends = last_windows(curves[curves["arm"] == ARM])
    trunk = curves[curves["arm"] == TRUNK][["seed", "tokens", "value"]]
    both = ends.merge(trunk, on=["seed", "tokens"], suffixes=("", "_trunk")).dropna(subset=["value", "value_trunk"])
    gaps = both["value"] / both["value_trunk"] - 1
    return {int(seed): float(gap) for seed, gap in zip(both["seed"], gaps, strict=True)}


def _same_seed(results: Results, arm: str) -> dict[str, str]:
    """Return, for each trial, the trial of this arm in its sweep and seed."""
    there = {(m.cell.sweep, m.cell.seed): m.id for m in results.members if m.cell.arm == arm}
    return {m.id: there[m.cell.sweep, m.cell.seed] for m in results.members if (m.cell.sweep, m.cell.seed) in there}
