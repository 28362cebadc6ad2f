"""Render claims and verdicts as HTML: labels, counts, and a card for each claim."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import WITHIN, Kind
from fewbits.analysis.views.html import bounds, effect, render, size
from fewbits.common.wording import plural

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
    """Return one claim as HTML, with its verdict, its comparisons and its controls.

    usual, judged_at: the sizes of runs in words and the scale that the page states once; others are shown on the card.
    """
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


def view(finding: Finding) -> FindingView:
    """Convert a finding to text for display."""
    interval, sign, extra = finding.interval, finding.test != WITHIN, finding.extra_interval
    half, printed = interval.half if interval else None, finding.printed
    return FindingView(
        finding.heading,
        badge(finding.status),
        "" if finding.effect is None else effect(finding.effect, half, finding.relative, sign=sign),
        bounds(interval.low, interval.high, finding.relative, sign=sign) if interval else "",
        plural(finding.n, finding.unit) if finding.n else "",
        "" if finding.extra_tokens is None else effect(finding.extra_tokens, extra.half if extra else None, True),
        "" if printed is None else effect(printed, None, finding.relative, sign=sign),
        f"± {size(finding.margin, finding.relative)}" if finding.margin else finding.bound,
    )


def to_json(record: object) -> str:
    """Return a record as indented JSON that ends with a line feed; raise ValueError for NaN and infinity."""
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
