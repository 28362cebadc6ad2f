"""Make the first screen of a report, which answers the study's question: a headline, a figure, a table of effects.

`studies/STUDY/tables.yaml` declares it under the key `top`. The sentences of the headline are templates: `{NAME}`
stands for the effect of the row NAME in words, which depend on the results alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Verdict
from fewbits.analysis.engine.claims.judging import find, scale_words
from fewbits.analysis.engine.claims.schema import ControlClaim, Kind, Part
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.statistics import Interval
from fewbits.analysis.views.claims import badge, tally, tokens
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import bounds, effect, size
from fewbits.common.wording import enumeration
from fewbits.sweeps.planning.studies import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fewbits.analysis.views.shown_figure import Drawing

# Words for an effect if its interval is below zero, contains zero, or is above it, and for one seed; {} is the effect.
WORDS = {
    "cost": (
        "lowers the loss by {}",
        "costs nothing that these runs can see (less than {})",
        "costs {} of loss",
        "changes the loss by {} in one seed (no error bar)",
    ),
    "loss": (
        "is {} lower",
        "is the same to within {}",
        "is {} higher",
        "differs by {} in one seed (no error bar)",
    ),
    "label": (),  # the label of the claim
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
    none: str  # if no effect is above zero


@dataclass(frozen=True)
class Top:
    """The first screen of a study's report."""

    question: str
    headline: tuple[str, ...]  # templates of sentences
    rows: tuple[TopRow, ...]
    ranking: Ranking | None = None

    def __post_init__(self) -> None:
        if len(self.rows) > 7:
            raise ValueError(f"top: {len(self.rows)} rows; at most 7 fit on the first screen")


@dataclass(frozen=True)
class Row:
    """A row of the table with its result."""

    of: TopRow
    finding: Finding | None  # None if the arms are not planned at this scale
    verdict: Verdict | None

    @property
    def words(self) -> str:
        """The effect in words, for the headline."""
        one = self.finding
        if self.of.words == "label":
            return str(self.verdict.outcome) if self.verdict else NOT_KNOWN
        if one is None or one.effect is None:
            return NOT_KNOWN
        lower, same, higher, single = WORDS[self.of.words]
        if one.interval is None:
            return single.format(shown_effect(one))
        if one.interval.low <= 0 <= one.interval.high:
            most = max(one.interval.high, -one.interval.low if self.of.words == "loss" else 0.0)
            return same.format(size(most, one.relative))
        return (higher if one.interval.low > 0 else lower).format(shown_effect(one, sign=False))

    def record(self) -> dict[str, Any]:
        """Return the row as numbers, for a DataFrame."""
        one = self.finding or Finding("", status=None, reason="")  # type: ignore[arg-type]
        low, high = (one.interval.low, one.interval.high) if one.interval else (None, None)
        return {
            "row": self.of.title,
            "effect": one.effect,
            "low": low,
            "high": high,
            "relative": one.relative,
            "seeds": one.n,
            "extra_tokens": one.extra_tokens,
            "paper": one.printed,
            "claim": self.of.claim,
            "verdict": str(self.verdict.outcome) if self.verdict else "",
        }

    def cells(self) -> dict[str, Any]:
        """Return the row as texts, for the page."""
        one = self.finding
        measured = one is not None and one.effect is not None and self.of.words != "label"
        return {
            "title": self.of.title,
            "effect": shown_effect(one) if measured and one else "",
            "bounds": _bounds(one) if measured and one else "",
            "tokens": tokens(one) if measured and one else "",
            "paper": "" if one is None or one.printed is None or not measured else _number(one, one.printed),
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
        if finding is not None or (verdict and verdict.outcome is not Outcome.NOT_RUN):
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
    return sentences or ["These runs have no result that answers it."]


def _ranked(of: Ranking, rows: Sequence[Row]) -> str:
    findings = [(row.of.title, row.finding) for row in rows if row.finding and row.finding.effect is not None]
    if not any(one.interval for _, one in findings):
        return ONE_SEED
    above = [(title, one) for title, one in findings if one.interval and one.interval.low > 0]
    above.sort(key=lambda pair: -(pair[1].effect or 0.0))
    if not above:
        return of.none
    others = enumeration(f"{title} ({shown_effect(one)})" for title, one in above[1:])
    rest = f"then {others}" if others else "no other part makes a difference that these runs can see"
    return of.some.format(first=above[0][0], effect=shown_effect(above[0][1]), rest=rest)


def shown_effect(one: Finding, *, sign: bool = True) -> str:
    """Return the effect of a finding as text; without a sign, its size."""
    assert one.effect is not None
    half = (one.interval.high - one.interval.low) / 2 if one.interval else None
    return effect(one.effect if sign else abs(one.effect), half, one.relative, sign=sign and one.test != "within")


def _bounds(one: Finding) -> str:
    if one.interval is None:
        return "one seed" if one.n == 1 else ""
    return bounds(one.interval.low, one.interval.high, one.relative, sign=one.test != "within")


def _number(one: Finding, value: float) -> str:
    return f"{'+' if value > 0 and one.test != 'within' else ''}{size(value, one.relative)}"


def limits(results: Results) -> str:
    """Return the size of the longest runs in words: parameters, steps in the recipe, tokens and seeds."""
    return scale_words(results, results.plan.trials, None)


def top_figure(rows: Sequence[Row]) -> Figure:
    """Draw the relative effects of the rows with their intervals, and the paper's numbers as hollow marks."""
    from fewbits.analysis.figures.effects import Estimate, draw_effects

    shown = []
    for row in rows:
        one = row.finding
        if one is not None and one.effect is not None and one.relative:
            shown.append(Estimate(row.of.title, one.effect, one.interval, one.printed, shown_effect(one)))
    most = [
        max(abs(value) for value in (*_ends(one.interval), one.mean, one.paper) if value is not None) for one in shown
    ]
    usual = FAR * sorted(most)[len(most) // 2]
    reach = 1.1 * max([value for value in most if value <= usual], default=0.0)
    return draw_effects(shown, [], None, "change of validation loss, %", reach or 1e-3)


def _ends(interval: Interval | None) -> tuple[float, ...]:
    return () if interval is None else (interval.low, interval.high)


def top_screen(
    study: Study,
    scale: str,
    size: str,
    of: Top | None,
    rows: Sequence[Row],
    verdicts: Mapping[str, Verdict],
    picture: Drawing | None,
) -> Markup:
    """Return the first screen as HTML."""
    groups = [(kind, [one for one in verdicts.values() if one.kind is kind]) for kind in Kind]
    return render(
        "top",
        study=study,
        scale=scale,
        limits=size,
        question=of.question if of else "",
        headline=headline(of, rows) if of else [],
        rows=[row.cells() for row in rows],
        paper=any(row.finding and row.finding.printed is not None for row in rows),
        tokens=any(row.finding and row.finding.extra_tokens is not None for row in rows),
        counts=[(str(kind), tally(members)) for kind, members in groups if members],
        picture=picture,
        alt="; ".join(f"{row.of.title} {row.words}" for row in rows),
    )
