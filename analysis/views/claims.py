"""Render claims and verdicts as HTML: the summary tables at the top of a report, and a card for each claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import WITHIN, Claim, Kind
from fewbits.analysis.engine.claims.verdicts import FAMILIES
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import bounds, effect, p_value, size
from fewbits.analysis.views.trials import Trials
from fewbits.common.wording import plural

# Signs that distinguish outcomes without colour.
SIGNS: dict[str, str] = {
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
# Kind → title and description of the group of claims of this kind.
GROUPS = {
    Kind.EMPIRICAL: (
        "The paper's empirical claims",
        "Statements about what happens in trained networks or on machines.",
    ),
    Kind.ARITHMETIC: ("Arithmetic and definitions", "These claims are checked by arithmetic or code, at any scale."),
    Kind.OURS: ("Our own findings", "Statements that the paper does not make."),
}
FEW = 4  # for a claim with more comparisons than this, a summary shows only how many are supported


@dataclass(frozen=True)
class ClaimGroup:
    """The claims of one kind, with the group's title and description."""

    title: str
    about: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class FindingView:
    """The fields of a finding as text for display; a field is "" if the finding does not have it."""

    name: str
    badge: Markup
    effect: str = ""
    bounds: str = ""  # the interval
    glyph: Markup | str = ""  # a small picture of the interval
    repeats: str = ""  # for example `3 seeds`
    tokens: str = ""  # the effect on a loss as extra tokens
    margin: str = ""  # the margin, or the bounds of a test that has bounds instead
    p: str = ""
    reason: str = ""


def badge(outcome: Outcome | Status) -> Markup:
    """Return the label of a claim's outcome or of a comparison's status as HTML, with a sign and a colour."""
    kind = {Status.SUPPORTED: "reproduced", Status.OPPOSED: "not reproduced"}
    name = kind.get(outcome, "cannot tell") if isinstance(outcome, Status) else outcome.value
    return render("badge", kind=name.replace(" ", "-"), sign=SIGNS.get(outcome, "–"), text=outcome.value)


def counts(verdicts: Mapping[str, Verdict]) -> str:
    """Return the number of verdicts of each outcome by kind: `the paper's empirical claims: 9 reproduced, …`."""
    found = []
    for kind in Kind:
        numbers = Counter(one.outcome for one in verdicts.values() if one.kind is kind)
        if numbers:
            found.append(f"{kind}: " + ", ".join(f"{numbers[one]} {one}" for one in Outcome if numbers[one]))
    return "; ".join(found)


def tally(verdicts: Iterable[Verdict], *, zeros: bool = True) -> Markup:
    """Return the number of verdicts of each outcome as HTML. zeros: include outcomes that no verdict has."""
    numbers = Counter(verdict.outcome for verdict in verdicts)
    return render(
        "tally", counts=[(numbers[outcome], badge(outcome)) for outcome in Outcome if zeros or numbers[outcome]]
    )


def rules() -> Markup:
    """Return the section of a report that explains how verdicts are made, as HTML."""
    return render("rules", families=FAMILIES)


def groups(verdicts: Mapping[str, Verdict]) -> list[ClaimGroup]:
    """Return the claims in groups by kind; groups without claims are missing."""
    claims = [verdict.claim for verdict in verdicts.values()]
    by_kind = [(text, tuple(claim for claim in claims if claim.kind is kind)) for kind, text in GROUPS.items()]
    return [ClaimGroup(*text, members) for text, members in by_kind if members]


def summary(verdicts: Mapping[str, Verdict]) -> Markup:
    """Return the summary as HTML: for each group of claims, a table of verdicts and the ids of claims not run."""
    shown = []
    for group in groups(verdicts):
        members = [verdicts[claim.id] for claim in group.claims]
        rows = [_row(verdict) for verdict in members if verdict.outcome is not Outcome.NOT_RUN]
        not_run = [verdict.claim for verdict in members if verdict.outcome is Outcome.NOT_RUN]
        shown.append((group, tally(members, zeros=False), rows, not_run))
    return render("summary", groups=shown)


def _row(verdict: Verdict) -> dict[str, object]:
    findings = [view(one) for one in verdict.findings if one.effect is not None]
    supported = sum(one.status is Status.SUPPORTED for one in verdict.findings)
    return {
        "claim": verdict.claim,
        "badge": badge(verdict.outcome),
        "findings": findings if len(findings) <= FEW else [],
        "count": f"{supported} of {plural(len(verdict.findings), 'comparison')} supported"
        if len(findings) > FEW
        else "",
        "repeats": ", ".join(dict.fromkeys(one.repeats for one in findings if one.repeats)),
        "controls": [(one.title, control_state(one)) for one in verdict.controls],
    }


def card(verdict: Verdict, trials: Trials) -> Markup:
    """Return one claim as HTML, with its verdict, findings and controls, and links to its trials."""
    claim, leading = verdict.claim, verdict.leading
    return render(
        "claim",
        claim=claim,
        verdict=verdict,
        not_run=verdict.outcome is Outcome.NOT_RUN,
        kind=verdict.outcome.value.replace(" ", "-"),
        badge=badge(verdict.outcome),
        group=claim.kind.value,
        leading=view(leading) if leading else None,
        margins=_margins(claim),
        controls=[
            (one, control_state(one), "; ".join(part.reason for part in one.findings)) for one in verdict.controls
        ],
        findings=[view(one) for one in verdict.findings] if len(verdict.findings) > 1 else [],
        few=FEW,
        notes=tuple(dict.fromkeys((*verdict.notes, *(note for one in verdict.findings for note in one.notes)))),
        trials=trials,
    )


def view(finding: Finding) -> FindingView:
    """Convert a finding to text for display."""
    interval, sign = finding.interval, finding.test != WITHIN
    half = (interval.high - interval.low) / 2 if interval else None
    return FindingView(
        finding.heading,
        badge(finding.status),
        effect(finding.effect, half, finding.relative, sign=sign) if finding.effect is not None else "",
        bounds(interval.low, interval.high, finding.relative, sign=sign) if interval else "",
        glyph(finding),
        plural(finding.n, finding.unit) if finding.n else "",
        f"{finding.extra_tokens:+.1%} tokens" if finding.extra_tokens is not None else "",
        size(finding.margin, finding.relative) if finding.margin else finding.bound,
        p_value(finding.p_for) if finding.p_for is not None else "",
        finding.reason,
    )


def control_state(control: ControlResult) -> str:
    """Return the result of a control as text: `✓ passed`, `✗ failed` or `? not tested`."""
    return "✓ passed" if control.passed else "✗ failed" if control.tested else "? not tested"


def _margins(claim: Claim) -> list[str]:
    """Return the margins of a claim's parts and the bounds of their tests as texts, each with the reason for its size.

    The bounds of a test are the numbers with which it compares a measured value (`Part.shown_bounds`).
    """
    margins = [margin for part in claim.parts if (margin := claim.margin_of(part)) is not None]
    shown = [
        f"{size(margin.value, margin.relative)}: {margin.reason}"
        if margin.value
        else "a third of what the whole recipe costs in the same runs"
        for margin in margins
    ]
    bounds = [f"{part.shown_bounds}: {part.reason}" for part in claim.parts if part.reason]
    return list(dict.fromkeys([*shown, *bounds]))


# -------------------------------------------------------------------------------- an interval as a picture

WIDTH, HEIGHT = 120.0, 16.0  # the size of the SVG
REACH = 2.5  # the picture's axis goes from -REACH · margin to REACH · margin


def glyph(finding: Finding) -> Markup:
    """Return a small SVG of a finding's effect and interval, with zero and the margin; empty without an interval."""
    if finding.effect is None or finding.interval is None:
        return Markup()
    low, high = finding.interval.low, finding.interval.high
    margin = finding.margin
    if finding.test == WITHIN:
        first, last = min(0.0, low), max(1.0, high)
    else:
        last = REACH * margin if margin else 1.2 * max(abs(low), abs(high), 1e-12)
        first = -last

    def x(value: float) -> float:
        return round(min(max((value - first) / (last - first), 0.0), 1.0) * (WIDTH - 8) + 4, 1)

    shown = f"{effect(finding.effect, (high - low) / 2, finding.relative)} {bounds(low, high, finding.relative)}"
    return render(
        "glyph",
        width=WIDTH,
        height=HEIGHT,
        zero=x(0),
        low=x(low),
        high=x(high),
        mean=x(finding.effect),
        band=(x(-margin), x(margin)) if margin else None,
        beyond=(low < first, high > last),
        title=shown + (f"; the shaded band is the margin, ± {size(margin, finding.relative)}" if margin else ""),
    )
