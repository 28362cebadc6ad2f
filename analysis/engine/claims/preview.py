"""Compute what a planned study can show: the minimum detectable effect (MDE) of each comparison of its claims.

An MDE follows from the number of planned seeds and from the standard deviation of the difference over seeds. The
latter is taken from the same comparison in the store, else from A/A comparisons in the store, else from the command
line (`fewbits claims study=… --power --sd validation_loss=0.0007`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from statsmodels.stats.power import TTestPower

from fewbits.analysis.engine.claims.judging import measured, printed_effect, resolve
from fewbits.analysis.engine.claims.pairs import again_noise
from fewbits.analysis.engine.claims.schema import BOUNDED, DIRECTIONS, Claim, Comparison, comparisons, load_claims
from fewbits.analysis.engine.claims.verdicts import MIN_SEEDS
from fewbits.analysis.engine.results.data import Differences
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import arm_table, pairs_of, scope_of
from fewbits.analysis.engine.statistics import ALPHA, estimate
from fewbits.common.wording import plural

POWER = 0.80  # the probability with which a test detects a true effect of the minimum detectable size
MOST_SEEDS = 200  # if more seeds are needed, messages say "more than 200"


@dataclass(frozen=True)
class Preview:
    """The power of one comparison of a claim with the planned seeds."""

    claim: str  # the claim's id
    comparison: Comparison
    seeds: int  # the number of seeds that the plan has for every arm of the comparison
    sd: float | None = None  # of the difference over seeds; None if it is unknown
    mde: float | None = None  # minimum detectable effect; None if it is unknown
    aim: float | None = None  # the effect to detect: the margin or, for a stated effect, the paper's own


def preview(study: str, results: Results, given: Mapping[str, float] | None = None) -> tuple[Preview, ...]:
    """Return the power of each comparison whose arms are planned. given: by metric, deviations if none is stored."""
    found = []
    for claim in load_claims(study).claims:
        for comparison in comparisons(claim, arm_table(study)):
            if comparison.arm and comparison.test in (*DIRECTIONS, *BOUNDED):
                compared, part = (comparison.arm, comparison.baseline), comparison.part
                scope = scope_of(results, compared, part.sweep, part.where, part.baseline_where)
                if scope is not None and (seeds := len(pairs_of(scope))):
                    sd = _sd(study, claim, comparison, results, given or {})
                    mde = minimum_detectable_effect(sd, seeds) if sd and seeds > 1 else None
                    value = comparison.margin.value if comparison.margin else None
                    aim = value if comparison.test in BOUNDED else printed_effect(study, comparison) or value
                    found.append(Preview(claim.id, comparison, seeds, sd, mde, aim))
    return tuple(found)


def _sd(study: str, claim: Claim, comparison: Comparison, results: Results, given: Mapping[str, float]) -> float | None:
    data = measured(study, claim, comparison, results)
    if isinstance(data, Differences) and len(data.values) > 1 and (own := estimate(data.values)) and own.error:
        return own.error * math.sqrt(own.n)
    values = resolve(study, results, comparison.metric).values
    if not callable(values) and (not isinstance(values, str) or values in results.metrics()):
        noise = again_noise(results, results, values, comparison.part.relative)
        if noise is not None and noise.error:
            return noise.error
    return given.get(comparison.metric)


def preview_lines(previews: Iterable[Preview]) -> list[str]:
    """Return the previews as lines of text: for each claim, the comparison with the greatest known MDE."""
    previews = list(previews)
    if not previews:
        return ["no claim has a comparison whose arms are all planned here, so there is no effect to detect"]
    lines = ["minimum detectable effect of each claim (power 80 %, one-sided at 5 %, before correction over claims):"]
    for claim in dict.fromkeys(one.claim for one in previews):
        own = [one for one in previews if one.claim == claim]
        few = f"; a verdict needs {MIN_SEEDS}" if min(one.seeds for one in own) < MIN_SEEDS else ""
        known = [one for one in own if one.mde is not None]
        if not known:
            lines.append(f"  {claim:4} unknown, {plural(own[0].seeds, 'seed')}{few}")
            continue
        worst = max(known, key=lambda one: one.mde or 0.0)
        text = f"  {claim:4} {_shown(worst, worst.mde or 0.0)}, {plural(worst.seeds, 'seed')}{few}"
        if worst.aim:
            needed = required_n(worst.sd or 0.0, abs(worst.aim)) or f"more than {MOST_SEEDS}"
            text += f"; {_shown(worst, abs(worst.aim))} needs {needed} seeds"
        lines.append(text)
    if all(one.sd is None for one in previews):
        lines.append("without results in this store, pass standard deviations: --sd validation_loss=0.0007")
    return lines


def _shown(one: Preview, value: float) -> str:
    return f"{100 * value:.3g} %" if one.comparison.part.relative else f"{value:.3g}"


# -------------------------------------------------------------------------------- power


def minimum_detectable_effect(sd: float, n: int) -> float:
    """Return the true mean difference that a test of n pairs detects with probability POWER."""
    return sd * _detectable(n)


@cache
def _detectable(n: int) -> float:
    return float(TTestPower().solve_power(nobs=n, alpha=ALPHA, power=POWER, alternative="larger"))


def required_n(sd: float, effect: float) -> int | None:
    """Return the least number of pairs that detects the effect with probability POWER; None if above MOST_SEEDS."""
    return next((n for n in range(2, MOST_SEEDS + 1) if minimum_detectable_effect(sd, n) <= effect), None)
