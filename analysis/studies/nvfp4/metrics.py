"""Numbers of NVFP4's trials that claims compare: the gap to BF16 around the decay, and where gradients err."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from fewbits.analysis.engine.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import measure, metric
from fewbits.analysis.engine.pairs import members_of, scope_of

LOSS = "validation_loss"
BASELINE, TRUNK, ARM, LONG = "bf16", "trunk", "nvfp4-trunk", "nvfp4-long"
LAST_PART = 5  # the last fifth of the blocks: as many as four are of the paper's twenty
ERROR = "gradient_error"


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
    scope = scope_of(results, (ARM, TRUNK, LONG, BASELINE), "switch")
    if scope is None:
        missing = NotPlanned(f"not run at this scale ({results.scale_name})")
        return {"stable": missing, "widening": missing}
    stable = _gaps_before(scope)
    losses, arms = _losses(scope), {arm: _by_seed(scope, arm) for arm in (ARM, LONG, BASELINE)}
    after = {
        seed: losses[trial] / losses[arms[BASELINE][seed]] - 1
        for seed, trial in arms[LONG].items()
        if trial in losses and arms[BASELINE].get(seed) in losses
    }
    trials = tuple(trial for one in arms.values() for trial in one.values())
    both = [seed for seed in after if seed in stable]
    if not both:
        nothing = NoData("no seed has ended before and after the decay", trials)
        return {"stable": nothing, "widening": nothing}
    return {
        "stable": Differences(tuple(stable.values()), True, trials),
        "widening": Differences(tuple(after[seed] - stable[seed] for seed in both), True, trials),
    }


def _gaps_before(scope: Results) -> dict[int, float]:
    curves = scope.curves(LOSS).drop_duplicates(["id", "tokens"])
    ours = curves[curves["arm"] == ARM]
    ends = ours[ours["step"] == ours.groupby("id")["step"].transform("max")]
    trunk = curves[curves["arm"] == TRUNK][["seed", "tokens", "value"]]
    both = ends.merge(trunk, on=["seed", "tokens"], suffixes=("", "_trunk")).dropna(subset=["value", "value_trunk"])
    gaps = both["value"] / both["value_trunk"] - 1
    return {int(seed): float(gap) for seed, gap in zip(both["seed"], gaps, strict=True)}


def _losses(results: Results) -> dict[str, float]:
    if LOSS not in results.trials:
        return {}
    done = results.trials[results.trials["state"] == "done"].dropna(subset=[LOSS])
    return {str(trial): float(value) for trial, value in zip(done["id"], done[LOSS], strict=True)}


def _by_seed(results: Results, arm: str) -> dict[int, str]:
    return {member.cell.seed: member.id for member in members_of(results, arm)}
