"""What a planned run can tell, before it runs: the minimum detectable effect of each claim, from measured spreads.

A claim cannot be decided by the planned seeds where fewer than two are planned, where the smallest effect that a null's
design detects exceeds its margin, or where the paper's own effect, less the margin, is smaller than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import yaml

from fewbits.analysis.engine.arms import arm_table
from fewbits.analysis.engine.claims import DIRECTIONS, NULLS, Comparison, comparisons, load_claims
from fewbits.analysis.engine.data import Differences
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.judging import resolve
from fewbits.analysis.engine.loading import load_hooks
from fewbits.analysis.engine.pairs import data_of, members_of, scope_of
from fewbits.analysis.engine.power import planned_effect
from fewbits.analysis.engine.printed import printed_effect
from fewbits.analysis.engine.tests import spread_of
from fewbits.common.from_dict import from_dict

FILE = Path(__file__).parents[1] / "papers" / "planning" / "spreads.yaml"


@dataclass(frozen=True)
class MeasuredSpread:
    """The spread of a metric's differences between arms, at one scale of a study."""

    study: str
    scale: str
    metric: str
    sd: float
    df: int
    source: str = ""


@dataclass(frozen=True)
class Preview:
    """What one comparison of a claim can tell with the planned seeds."""

    claim: str
    comparison: Comparison
    seeds: int
    mde: float | None  # None without a measured spread
    margin: float | None
    printed: float | None  # the paper's own effect
    reason: str = ""  # why it cannot be decided; empty where it can, or where that is unknown

    @property
    def undecidable(self) -> bool:
        return bool(self.reason)


@cache
def measured_spreads() -> tuple[MeasuredSpread, ...]:
    return tuple(from_dict(MeasuredSpread, one, FILE.name) for one in yaml.safe_load(FILE.read_text("utf-8")))


def preview(study: str, results: Results) -> tuple[Preview, ...]:
    """Return what the planned seeds can tell of every comparison of arms that the plan trains."""
    spreads = {one.metric: one for one in measured_spreads() if (one.study, one.scale) == (study, results.scale_name)}
    found = []
    for claim in load_claims(study).claims:
        for one in comparisons(claim, arm_table(study)):
            if (seeds := _planned_seeds(results, one)) is not None:
                found.append(_preview(study, claim.id, one, seeds, spreads.get(one.metric)))
    return tuple(found)


def spreads_of(study: str, results: Results) -> tuple[MeasuredSpread, ...]:
    """Return the median spread of each metric over the comparisons of finished runs, to be stored."""
    load_hooks(study)
    found: dict[str, list[tuple[float, int]]] = {}
    for claim in load_claims(study).claims:
        for one in comparisons(claim):
            if _planned_seeds(results, one) is None or one.test not in (*DIRECTIONS, *NULLS):
                continue
            data = data_of(results, one, lambda of, name: resolve(study, of, name))
            spread = spread_of(data) if isinstance(data, Differences) else None
            if spread is not None and spread.sd:
                found.setdefault(one.metric, []).append((spread.sd, spread.df))
    return tuple(
        MeasuredSpread(
            study,
            results.scale_name,
            metric,
            float(f"{median(sd for sd, _ in all_of):.3g}"),
            int(median(df for _, df in all_of)),
        )
        for metric, all_of in found.items()
    )


def _planned_seeds(results: Results, comparison: Comparison) -> int | None:
    """Return how many seeds the plan has of both arms; None where it does not have them."""
    if not comparison.arm:
        return None
    arms = (comparison.arm, comparison.baseline) if comparison.baseline else (comparison.arm,)
    part = comparison.part
    scope = scope_of(results, arms, part.sweep, comparison.where, part.baseline_where)
    if scope is None:
        return None
    wheres = (comparison.where, part.baseline_where if part.baseline_where is not None else comparison.where)
    seeds = [
        {member.cell.seed for member in members_of(scope, arm, where)} for arm, where in zip(arms, wheres, strict=False)
    ]
    return len(set.intersection(*seeds))


def _preview(study: str, claim: str, one: Comparison, seeds: int, spread: MeasuredSpread | None) -> Preview:
    margin = one.margin.value if one.margin else None
    printed = printed_effect(study, one)
    mde = None
    if spread is not None and one.test in (*DIRECTIONS, *NULLS):
        mde = planned_effect(spread.sd, spread.df, seeds)
    reason = ""
    if seeds < 2:
        reason = "one seed has no interval"
    elif mde is not None and one.test in NULLS and margin is not None and mde > margin:
        reason = f"detects {_shown(one, mde)}, above the margin of {_shown(one, margin)}"
    elif mde is not None and one.test in DIRECTIONS and printed is not None and mde > abs(printed) - (margin or 0.0):
        beyond = abs(printed) - (margin or 0.0)
        reason = f"detects {_shown(one, mde)}, above what the paper prints beyond the margin, {_shown(one, beyond)}"
    return Preview(claim, one, seeds, mde, margin, printed, reason)


def _shown(comparison: Comparison, value: float) -> str:
    return f"{100 * value:.3g} %" if comparison.part.relative else f"{value:.3g}"


def preview_lines(found: Iterable[Preview]) -> list[str]:
    """Return the preview as text: a line for each claim with a known spread, then the claims that cannot be decided."""
    found = list(found)
    lines = ["minimum detectable effect of each claim (80 % power, one side at 5 %, before correction for all claims):"]
    for claim in dict.fromkeys(one.claim for one in found):
        known = [one for one in found if one.claim == claim and one.mde is not None]
        if known:
            worst = max(known, key=lambda one: one.mde or 0.0)
            margin = f", margin {_shown(worst.comparison, worst.margin)}" if worst.margin else ""
            lines.append(f"  {claim:4} {_shown(worst.comparison, worst.mde or 0.0)}{margin}, {worst.seeds} seeds")
    if len(lines) == 1:
        lines = ["minimum detectable effects: no spread is stored for this study and scale (fewbits claims --spreads)"]
    undecidable = {one.claim: one for one in found if one.undecidable}
    if undecidable:
        lines.append("claims that the planned seeds cannot decide, or only in part:")
        lines += [f"  {name:4} {one.comparison.title}: {one.reason}" for name, one in undecidable.items()]
    return lines
