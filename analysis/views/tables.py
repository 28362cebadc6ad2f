"""Render tables, claims and verdicts as HTML.

A row of a table has up to three lines: the paper's numbers, ours, and the differences. A claim is a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import WITHIN, Kind
from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.report.items import Missing, OutOfReach, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.items import why_missing as why
from fewbits.analysis.views.html import bounds, decimals, effect, number, render, sentence, size
from fewbits.common.wording import plural

# The maximal number of decimals in the papers. Numbers that are computed from the papers' numbers get no more decimals.
PRINTED = 4
BRIEF: dict[type[Missing], str] = {NoData: "no data", NotPlanned: "not run", OutOfReach: "out of reach"}


@dataclass(frozen=True)
class CellView:
    text: str
    small: str = ""  # text in small letters: the half width of the interval, or a remark
    title: str | None = None  # the tooltip
    kind: str = "number"  # the CSS class
    span: int = 1  # the number of columns that the cell covers


def table_html(result: TableResult, notes: Sequence[str]) -> Markup:
    """Return the table as HTML, with these of its notes.

    The rows are left out if all our numbers are missing because the sweeps of the report's scale do not have the arms
    that give them; then the reason is shown.
    """
    ours = [cell.ours for row in result.rows for cell in row.cells]
    missing = next((one for one in ours if isinstance(one, NotPlanned)), None)
    folded = all(isinstance(one, NotPlanned | OutOfReach) or one == Setting("") for one in ours)
    unreached = dict.fromkeys(f"Out of reach: {one.reason}" for one in ours if isinstance(one, OutOfReach))
    # There are groups if all titles have the form `GROUP: NAME` and at least two columns have the same group.
    parts = [column.partition(": ") for column in result.columns]
    grouped = all(name for _, _, name in parts) and len({group for group, _, _ in parts}) < len(parts)
    groups = groupby(parts if grouped else (), key=lambda part: part[0])
    return render(
        "table",
        groups=[(group, len(list(several))) for group, several in groups],
        heads=[name for _, _, name in parts] if grouped else result.columns,
        rows=[(row, _lines(row)) for row in result.rows],
        notes=(*notes, *unreached),
        folded=sentence(why(missing)) if missing and folded else "",
    )


def _lines(row: TableRow) -> dict[str, tuple[CellView, ...]]:
    """Return the lines of a row: always the line `ours`; the lines `paper` and `difference` only if they have text."""
    printed = [f"{cell.paper:.10g}" for cell in row.cells if isinstance(cell.paper, float)]
    # The decimals that show all of the paper's numbers in the row exactly, but at most PRINTED.
    exact = min(PRINTED, max((len(text.partition(".")[2]) for text in printed if "e" not in text), default=0))
    values = [cell.ours for cell in row.cells if isinstance(cell.ours, Value)]
    counted = all(value.interval is None and float(value.mean).is_integer() for value in values)
    places = 0 if counted else PRINTED
    lines = {
        "paper": tuple(_paper(cell, exact) for cell in row.cells),
        "ours": _merged(row) or tuple(_ours(cell, places) for cell in row.cells),
        "difference": tuple(_difference(cell, places) for cell in row.cells),
    }
    return {name: cells for name, cells in lines.items() if name == "ours" or any(one.text for one in cells)}


def _merged(row: TableRow) -> tuple[CellView, ...]:
    """Return a cell as wide as the row if all our numbers in the row are missing for the same reason; else ()."""
    missing = [cell.ours for cell in row.cells if isinstance(cell.ours, Missing)]
    if len(missing) < len(row.cells) or len({why(ours) for ours in missing}) != 1:
        return ()
    text = BRIEF[OutOfReach] if isinstance(missing[0], OutOfReach) else why(missing[0])
    return (CellView(text, kind="missing", span=len(row.cells)),)


def _paper(cell: TableCell, places: int) -> CellView:
    text = number(cell.paper, places) if isinstance(cell.paper, float) else cell.paper or ""
    return CellView(text, title=cell.source if text else None)


def _ours(cell: TableCell, places: int) -> CellView:
    ours = cell.ours
    if isinstance(ours, Setting):
        return CellView(ours.text, " assumed" if ours.assumed else "", kind="setting")
    if not isinstance(ours, Value):
        return CellView(BRIEF[type(ours)], title=why(ours), kind="missing")
    seeds = f"mean of {ours.n} seeds" if ours.n > 1 else "one seed, which gives no interval"
    if not ours.trials:  # the number was timed or computed without training
        seeds = f"timed {ours.n} times" if ours.n else "computed"
    level = f", ± {ours.interval.level:.0%} interval" if ours.interval else ""
    title = "; ".join(filter(None, [f"{seeds}{level}", *ours.notes]))
    half = f" ± {number(ours.interval.half, _places(ours, places))}" if ours.interval else ""
    return CellView(number(ours.mean, _places(ours, places)), half, title)


def _difference(cell: TableCell, places: int) -> CellView:
    if cell.difference is None or not isinstance(cell.ours, Value):
        return CellView("")
    return CellView(number(cell.difference, _places(cell.ours, places), sign=True))


def _places(ours: Value, places: int) -> int:
    return decimals(ours.mean, ours.interval.half) if ours.interval else places


# ------------------------------------------------------------------------------------------------ claims

SIGNS: dict[str, str] = {  # they distinguish outcomes without colour
    Outcome.REPRODUCED: "✓",
    Outcome.MIXED: "◐",
    Outcome.NOT_REPRODUCED: "✗",
    Outcome.CANNOT_TELL: "?",
    Outcome.NOT_TESTABLE: "–",
    Outcome.NOT_RUN: "·",
    Status.SUPPORTED: "✓",
    Status.OPPOSED: "✗",
    Status.UNDECIDED: "?",
}
WORDS = 8  # of a reason beside a list of comparisons
MOST_TOKENS = 2.0  # a baseline's curve says little about more than three times its tokens
MOST = 3  # comparisons that a card lists; tables/claims.csv has all


@dataclass(frozen=True)
class FindingView:
    """The fields of a finding as text for display; a field is "" if the finding does not have it."""

    name: str
    badge: Markup
    effect: str = ""
    bounds: str = ""  # the interval
    repeats: str = ""  # for example `3 seeds`
    tokens: str = ""  # the effect on a loss as extra tokens
    paper: str = ""  # the paper's own effect
    margin: str = ""  # the margin, or the bounds of a test that has bounds instead


def badge(outcome: Outcome | Status) -> Markup:
    """Return the label of a claim's outcome or of a comparison's status as HTML, with a sign and a colour."""
    kind = {Status.SUPPORTED: "reproduced", Status.OPPOSED: "not reproduced"}
    name = kind.get(outcome, "cannot tell") if isinstance(outcome, Status) else outcome.value
    sign = SIGNS.get(outcome, "–")
    return Markup('<span class="badge {}"><span aria-hidden="true">{}</span> {}</span>').format(
        name.replace(" ", "-"), sign, outcome.value
    )


def counts(verdicts: Mapping[str, Verdict]) -> str:
    """Return the number of verdicts of each outcome by kind: `the paper's empirical claims: 9 reproduced, …`."""
    of_kind = {kind: Counter(one.outcome for one in verdicts.values() if one.kind is kind) for kind in Kind}
    texts = {kind: ", ".join(f"{n[one]} {one}" for one in Outcome if n[one]) for kind, n in of_kind.items()}
    return "; ".join(f"{kind}: {text}" for kind, text in texts.items() if text)


def tallies(counted: str) -> list[tuple[str, Markup]]:
    """Return (kind of claim, its numbers of verdicts as HTML) for each kind in a text that `counts` has returned."""
    found = []
    for kind, numbers in (one.split(": ") for one in counted.split("; ") if one):
        pairs = (one.split(" ", 1) for one in numbers.split(", "))
        items = Markup().join(Markup("<li><b>{}</b> {}</li>").format(n, badge(Outcome(name))) for n, name in pairs)
        found.append((kind[0].upper() + kind[1:], Markup('<ul class="tally">{}</ul>').format(items)))
    return found


def cards(verdicts: Iterable[Verdict]) -> Markup:
    """Return all claims as HTML in groups by kind; claims that were not run are only named."""
    verdicts, groups = list(verdicts), []
    usual = [scale for scale, _ in Counter(verdict.scale for verdict in verdicts if verdict.scale).most_common(2)]
    judged_at = Counter(verdict.claim.judged_at for verdict in verdicts).most_common(1)[0][0] if verdicts else ""
    for kind in Kind:
        members = [verdict for verdict in verdicts if verdict.kind is kind]
        run = [verdict for verdict in members if verdict.outcome is not Outcome.NOT_RUN]
        not_run = [verdict.claim for verdict in members if verdict.outcome is Outcome.NOT_RUN]
        if members:
            groups.append((str(kind), Markup().join(card(one, usual, judged_at) for one in run), not_run))
    return render("claims", groups=groups, usual=usual, judged_at=judged_at)


def card(verdict: Verdict, usual: Sequence[str] = (), judged_at: str = "") -> Markup:
    """Return one claim as HTML; the sizes and scale that the page states once (usual, judged_at) are not repeated."""
    claim = verdict.claim
    run = [one for one in verdict.findings if one.status is not Status.NOT_RUN] or list(verdict.findings)
    findings = [view(one) for one in run]
    listed = len(findings) > 1 or any(one.effect for one in findings)
    return render(
        "claim",
        claim=claim,
        kind=verdict.outcome.value.replace(" ", "-"),
        badge=badge(verdict.outcome),
        reason=_short(verdict.reason) if listed else verdict.reason,
        scale="" if verdict.scale in usual else verdict.scale,
        judged_at="" if claim.judged_at == judged_at else claim.judged_at,
        test=verdict.outcome is not Outcome.NOT_TESTABLE and verdict.kind is not Kind.ARITHMETIC,
        findings=findings[:MOST] if listed else [],
        more=len(verdict.findings) - min(len(findings), MOST),
        columns={name for name in ("effect", "tokens", "paper") if any(getattr(one, name) for one in findings)},
        margins=list(dict.fromkeys(one.margin for one in findings if one.margin)),
        controls=[(one.id, "failed" if one.tested else "not tested") for one in verdict.controls if not one.passed],
    )


def _short(reason: str) -> str:
    """Return the beginning of a reason, as many clauses as have at most WORDS words; the comparisons say the rest."""
    clauses = reason.replace(". ", "; ").split("; ")
    ends = [place for place in range(1, len(clauses) + 1) if len(" ".join(clauses[:place]).split()) <= WORDS]
    return "; ".join(clauses[: ends[-1] if ends else 1])


def _tokens(finding: Finding) -> str:
    more, interval = finding.extra_tokens, finding.extra_interval
    if more is not None and more > MOST_TOKENS:
        return f"> +{MOST_TOKENS:.0%}"
    return "" if more is None else effect(more, interval.half if interval else None, True)


def view(finding: Finding) -> FindingView:
    interval, sign = finding.interval, finding.test != WITHIN
    half, printed = interval.half if interval else None, finding.printed
    return FindingView(
        finding.heading,
        badge(finding.status),
        "" if finding.effect is None else effect(finding.effect, half, finding.relative, sign=sign),
        bounds(interval.low, interval.high, finding.relative, sign=sign) if interval else "",
        plural(finding.n, finding.unit) if finding.n else "",
        _tokens(finding),
        "" if printed is None else effect(printed, None, finding.relative, sign=sign),
        f"± {size(finding.margin, finding.relative)}" if finding.margin else finding.bound,
    )
