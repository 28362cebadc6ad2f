"""Make the first screen of a report, which answers the study's question: a headline, a figure, a table of effects.

`studies/STUDY/tables.yaml` declares it under the key `top`. The sentences of the headline are templates: `{NAME}`
stands for the effect of the row NAME in words, which depend on the results alone. At scale smoke, which decides
nothing, the headline says so instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.judging import find
from fewbits.analysis.engine.claims.schema import ControlClaim, Part
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.effects import Estimate, draw_effects
from fewbits.analysis.figures.theme import draw_figure, in_both_themes, svg
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.views.html import effect, published, render, size
from fewbits.analysis.views.shown import data_uri, numbers_of
from fewbits.analysis.views.tables import badge, counts, tallies, view
from fewbits.common.wording import enumeration
from fewbits.sweeps.planning.studies import Study

SMOKE = "smoke"
# Words for an effect if its interval is below zero, contains zero, or is above it, and for one seed; {} is the effect.
WORDS = {
    "cost": (
        "lowers the loss by {}",
        "costs less than {} of loss, if any",
        "costs {} of loss",
        "changes the loss by {} in one seed (no error bar)",
    ),
    "loss": (
        "is {} lower",
        "differs by less than {}, if at all",
        "is {} higher",
        "differs by {} in one seed (no error bar)",
    ),
    "label": (),  # words for the verdict of the claim
}
OF_CLAIM = {
    Outcome.REPRODUCED: "is reproduced",
    Outcome.MIXED: "is mixed: some of its parts hold",
    Outcome.NOT_REPRODUCED: "is not reproduced",
    Outcome.CANNOT_TELL: "cannot be told from these runs",
    Outcome.NOT_TESTABLE: "cannot be tested with these runs",
    Outcome.NOT_RUN: "was not run",
}
FAR = 4.0  # the axis does not extend to effects greater than FAR times the median of the rows
NOT_KNOWN = "has no result"
ONE_SEED = "One seed cannot rank the recipe's parts."


@dataclass(frozen=True)
class TopRow:
    """A row of the table: an effect, and the claim of the paper that it belongs to."""

    title: str
    name: str = ""  # the name of the effect in the headline
    part: Part | None = None  # the comparison; None: the leading comparison of the claim
    claim: str = ""  # the id of the claim whose label is shown
    words: str = "cost"  # a key of WORDS


@dataclass(frozen=True)
class Ranking:
    """A sentence of the headline about the largest of several effects."""

    rows: tuple[str, ...]  # names of rows
    some: str  # {first}: the title of the largest effect; {effect}: its size; {rest}: words about the others
    none: str  # if no effect is above zero; {rows}: each row with the upper end of its interval


@dataclass(frozen=True)
class Top:
    question: str
    headline: tuple[str, ...]  # templates of sentences
    rows: tuple[TopRow, ...]  # at most seven fit on the first screen
    ranking: Ranking | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table with its result."""

    of: TopRow
    finding: Finding | None  # None if the arms are not planned at this scale
    verdict: Verdict | None

    @property
    def words(self) -> str:
        one = self.finding
        if self.of.words == "label":
            return OF_CLAIM[self.verdict.outcome] if self.verdict else NOT_KNOWN
        if one is None or one.effect is None:
            return NOT_KNOWN
        lower, same, higher, single = WORDS[self.of.words]
        if one.interval is None:
            return single.format(view(one).effect)
        if one.interval.low <= 0 <= one.interval.high:
            most = max(one.interval.high, -one.interval.low if self.of.words == "loss" else 0.0)
            return same.format(size(most, one.relative))
        words = higher if one.interval.low > 0 else lower
        return words.format(effect(abs(one.effect), one.interval.half, one.relative, sign=False))

    def record(self) -> dict[str, Any]:
        one = self.finding or Finding("", Status.NOT_RUN, "")
        numbers = {"seeds" if name == "n" else name: value for name, value in numbers_of(one).items()}
        verdict = str(self.verdict.outcome) if self.verdict else ""
        return {"row": self.of.title, **numbers, "claim": self.of.claim, "verdict": verdict}

    def cells(self) -> dict[str, Any]:
        measured = self.finding if self.of.words != "label" else None
        shown = view(measured) if measured and measured.effect is not None else None
        return {
            "title": self.of.title,
            "effect": shown.effect if shown else "",
            "bounds": (shown.bounds or "one seed" * (measured.n == 1)) if shown and measured else "",
            "tokens": shown.tokens if shown else "",
            "paper": shown.paper if shown else "",
            "claim": self.of.claim,
            "badge": badge(self.verdict.outcome) if self.verdict else "",
        }


def top_rows(results: Results, study: str, of: Top, verdicts: Mapping[str, Verdict]) -> list[Row]:
    """Return the rows of the first screen; those whose arms this scale does not plan are left out."""
    rows = []
    for row in of.rows:
        verdict = verdicts.get(row.claim)
        if row.part is None:
            finding = verdict.leading if verdict else None
        else:
            finding = find(study, ControlClaim(f"top {row.title}", row.title, (row.part,)), results)[0]
        if finding is not None and finding.effect is None and not finding.trials:
            finding = None
        if finding is not None or (row.part is None and verdict and verdict.outcome is not Outcome.NOT_RUN):
            rows.append(Row(row, finding, verdict))
    return rows


def headline(of: Top, rows: Sequence[Row]) -> list[str]:
    """Return the sentences of the headline; those whose effects this scale does not have are left out."""
    known = {row.of.name: row for row in rows if row.of.name and row.finding is not None}
    sentences = []
    for template in of.headline:
        try:
            sentences.append(template.format(**{name: row.words for name, row in known.items()}))
        except KeyError:
            continue
    if of.ranking and (ranked := [known[name] for name in of.ranking.rows if name in known]):
        sentences.append(_ranked(of.ranking, ranked))
    return sentences or ["These runs do not answer it; the tables and claims below say what they show."]


def _ranked(of: Ranking, rows: Sequence[Row]) -> str:
    findings = [(row.of.title, row.finding) for row in rows if row.finding and row.finding.effect is not None]
    if not any(one.interval for _, one in findings):
        return ONE_SEED
    above = [(title, one) for title, one in findings if one.interval and one.interval.low > 0]
    above.sort(key=lambda pair: -(pair[1].effect or 0.0))
    if not above:
        most = [(title.partition(",")[0], one.interval.high, one.relative) for title, one in findings if one.interval]
        costs = (f"{title} it costs less than {size(max(high, 0.0), relative)}" for title, high, relative in most)
        return of.none.format(rows=enumeration(costs))
    others = enumeration(f"{title} ({view(one).effect})" for title, one in above[1:])
    rest = f"then {others}" if others else "no other part makes a difference that these runs can see"
    return of.some.format(first=above[0][0], effect=view(above[0][1]).effect, rest=rest)


def top_figure(rows: Sequence[Row]) -> Figure | None:
    """Draw the relative effects with their intervals, and the paper's numbers as hollow marks; None without any."""
    findings = [(row.of.title, row.finding) for row in rows if row.finding and row.finding.relative]
    shown = [
        Estimate(title, one.effect, one.interval, one.printed, view(one).effect)
        for title, one in findings
        if one.effect is not None
    ]
    if not shown:
        return None
    ends = [(one.mean, *((one.interval.low, one.interval.high) if one.interval else ())) for one in shown]
    most = [max(map(abs, some)) for some in ends]
    usual = FAR * sorted(most)[len(most) // 2]
    most += [abs(one.paper) for one in shown if one.paper is not None]
    reach = 1.1 * max([value for value in most if value <= usual], default=0.0) or 1e-3
    label = "change of validation loss, %"
    return draw_figure(FigureResult(lambda: draw_effects(shown, [], None, label, reach)))


def top_screen(
    study: Study, scale: str, size: str, of: Top | None, rows: Sequence[Row], verdicts: Mapping[str, Verdict]
) -> Markup:
    figure = top_figure(rows)
    return render(
        "top",
        study=study,
        scale=scale,
        smoke=scale == SMOKE,
        published=published(study.name),
        limits=size,
        question=of.question if of else "",
        headline=headline(of, rows) if of else [],
        rows=[row.cells() for row in rows],
        paper=any(row.finding and row.finding.printed is not None for row in rows),
        tokens=any(row.finding and row.finding.extra_tokens is not None for row in rows),
        counts=tallies(counts(verdicts)),
        image=data_uri(in_both_themes(svg(figure))) if figure else "",
        alt="; ".join(f"{row.of.title} {row.words}" for row in rows),
    )
