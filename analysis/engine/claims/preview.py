"""Compute what a planned study can show: the minimum detectable effect (MDE) of each comparison.

MDEs follow from the number of planned seeds and from the spread over seeds in earlier runs
(spreads.yaml). The planned seeds cannot decide a comparison in three cases:

* there are fewer than two seeds;
* the test has to show that the effect is smaller than the margin (`no_worse`, `equivalent`), and MDE > margin;
* the test has to show that the effect exceeds the margin (`higher`, `lower`), and MDE > |the paper's effect| - margin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import yaml

from fewbits.analysis.engine.claims.hooks import load_hooks
from fewbits.analysis.engine.claims.judging import resolve
from fewbits.analysis.engine.claims.pairs import LATE, data_of, members_of, scope_of
from fewbits.analysis.engine.claims.probed import at_probes
from fewbits.analysis.engine.claims.schema import BOUNDED, DIRECTIONS, Comparison, comparisons, load_claims
from fewbits.analysis.engine.claims.tests import spread_of
from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import Differences
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.statistics.power import planned_effect
from fewbits.common.from_dict import from_dict

FILE = Path(__file__).with_name("spreads.yaml")


@dataclass(frozen=True)
class MeasuredSpread:
    """A row of spreads.yaml: how much the difference between two arms varies over seeds, at one scale of a study."""

    study: str
    scale: str
    metric: str
    sd: float  # the standard deviation over seeds of the relative difference between two arms
    df: int  # the degrees of freedom of sd
    source: str = ""  # where the value was measured


@dataclass(frozen=True)
class Preview:
    """The power of one comparison of a claim with the planned seeds."""

    claim: str  # the claim's id
    comparison: Comparison
    seeds: int  # the number of seeds that the plan has for every arm of the comparison
    mde: float | None  # minimum detectable effect; None if it is unknown
    margin: float | None
    printed: float | None  # the paper's own effect; None if the paper prints none
    reason: str = ""  # why the planned seeds cannot decide the comparison; empty if they can, or if this is unknown

    @property
    def undecidable(self) -> bool:
        """True if the planned seeds are known to be too few for the comparison."""
        return bool(self.reason)


@cache
def measured_spreads() -> tuple[MeasuredSpread, ...]:
    """Return the rows of spreads.yaml."""
    return tuple(from_dict(MeasuredSpread, entry, FILE.name) for entry in yaml.safe_load(FILE.read_text("utf-8")))


def preview(study: str, results: Results) -> tuple[Preview, ...]:
    """Return the power (a Preview) of each comparison in the study's claims, if all arms of the comparison are planned.

    results: the results of the plan; no trial needs to have run.
    """
    at_scale = (study, results.scale_name)
    spreads = {spread.metric: spread for spread in measured_spreads() if (spread.study, spread.scale) == at_scale}
    previews, study_claims = [], load_claims(study)
    for claim in study_claims.claims:
        if study_claims.unfit_at(results.scale_name, claim):
            continue
        for comparison in comparisons(at_probes(claim, results), arm_table(study)):
            if (seeds := _planned_seeds(results, comparison)) is not None:
                spread = spreads.get(comparison.metric) if comparison.arm else None
                previews.append(_preview(study, claim.id, comparison, seeds, spread))
    return tuple(previews)


def spreads_of(study: str, results: Results) -> tuple[MeasuredSpread, ...]:
    """Return rows for spreads.yaml: for each metric, the median `sd` and `df` over the comparisons with data.

    sd: the standard deviation over seeds of the difference between two arms. df: the degrees of freedom of sd.
    """
    load_hooks(study)
    by_metric: dict[str, list[tuple[float, int]]] = {}
    for claim in load_claims(study).claims:
        for comparison in comparisons(at_probes(claim, results)):
            if not comparison.arm or comparison.test not in (*DIRECTIONS, *BOUNDED):
                continue
            if _planned_seeds(results, comparison) is None:
                continue
            data = data_of(results, comparison, lambda scope, name: resolve(study, scope, name))
            spread = (data.spread or spread_of(data)) if isinstance(data, Differences) else None
            if spread is not None and spread.sd:
                by_metric.setdefault(comparison.metric, []).append((spread.sd, spread.df))
    return tuple(
        MeasuredSpread(
            study,
            results.scale_name,
            metric,
            float(f"{median(sd for sd, _ in spreads):.3g}"),
            int(median(df for _, df in spreads)),
        )
        for metric, spreads in by_metric.items()
    )


def _planned_seeds(results: Results, comparison: Comparison) -> int | None:
    """Return how many seeds all arms of the comparison share in the plan; None if an arm is not planned.

    Also return None for comparisons without arms, such as exact checks.
    """
    if comparison.part.formula:
        places = {(term.sweep, term.arm) for term in comparison.part.terms.values()}
        by_arm = [{m.cell.seed for m in results.members if (m.cell.sweep, m.cell.arm) == place} for place in places]
        return len(set.intersection(*by_arm)) if all(by_arm) else None
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


def _preview(study: str, claim: str, comparison: Comparison, seeds: int, spread: MeasuredSpread | None) -> Preview:
    margin = comparison.margin.value if comparison.margin else None
    printed = printed_effect(study, comparison)
    beyond = abs(printed or 0.0) - (margin or 0.0)
    mde = None
    if spread is not None and comparison.test in (*DIRECTIONS, *BOUNDED):
        mde = planned_effect(spread.sd, spread.df, seeds)
    reason = ""
    if seeds < 2:
        reason = "an interval needs at least two seeds"
    elif mde is not None and comparison.test in BOUNDED and margin is not None and mde > margin:
        reason = (
            f"minimum detectable effect {_shown(comparison, mde)}, above the margin of {_shown(comparison, margin)}"
        )
    elif mde is not None and comparison.test in DIRECTIONS and printed is not None and mde > beyond:
        reason = (
            f"minimum detectable effect {_shown(comparison, mde)}, above {_shown(comparison, beyond)}, which is the "
            "paper's own effect minus the margin"
        )
    return Preview(claim, comparison, seeds, mde, margin, printed, reason)


def printed_effect(study: str, comparison: Comparison) -> float | None:
    """Return the effect that the paper prints for a comparison; None if it prints none.

    The effect is a fraction of the baseline's number if the comparison is relative, else it is in the metric's unit.
    """
    printed = comparison.part.printed
    if printed is None:
        return None
    names = {
        "arm": comparison.arm,
        "baseline": comparison.baseline,
        "metric": comparison.metric.removesuffix(LATE),
        "value": comparison.value,
    }
    source = paper(study)
    if printed.number or printed.value is not None:
        value = source.numbers[printed.number.format(**names)].value if printed.number else printed.value
        return -value if printed.negative and value is not None else value
    table, row, column = source.table(printed.table), printed.row.format(**names), printed.column.format(**names)
    value = table.value(row, column)
    if value is None or not printed.baseline:
        return value
    base = table.value(row, printed.baseline.format(**names))
    if base is None:
        return None
    return (value - base) / abs(base) if comparison.part.relative else value - base


def _shown(comparison: Comparison, value: float) -> str:
    return f"{100 * value:.3g} %" if comparison.part.relative else f"{value:.3g}"


def preview_lines(previews: Iterable[Preview]) -> list[str]:
    """Return the previews as lines of text in two parts, each below a heading.

    The first part has a line for each claim with a known MDE, with the largest MDE of the claim's comparisons. The
    second part has a line for each comparison that the planned seeds cannot decide.
    """
    previews = list(previews)
    lines = ["minimum detectable effect of each claim (power 80 %, one-sided at 5 %, before correction over claims):"]
    for claim in dict.fromkeys(one.claim for one in previews):
        known = [one for one in previews if one.claim == claim and one.mde is not None]
        if known:
            worst = max(known, key=lambda one: one.mde or 0.0)
            margin = f", margin {_shown(worst.comparison, worst.margin)}" if worst.margin else ""
            coarse = worst.margin and (worst.mde or 0.0) > worst.margin and worst.comparison.test in DIRECTIONS
            note = ": can show a large effect, but not that an effect is below the margin" if coarse else ""
            lines.append(f"  {claim:4} {_shown(worst.comparison, worst.mde or 0.0)}{margin}, {worst.seeds} seeds{note}")
    if len(lines) == 1:
        lines = [
            "minimum detectable effects are unknown, because analysis/engine/claims/spreads.yaml has no row for this "
            "study and scale; to print rows from finished runs: fewbits claims … --spreads"
        ]
    undecidable = [one for one in previews if one.undecidable]
    if undecidable:
        lines.append("comparisons that the planned seeds cannot decide:")
        lines += [f"  {one.claim:4} {one.comparison.title}: {one.reason}" for one in undecidable]
    return lines
