"""Render claims and verdicts as HTML: the summary tables at the top of a report, and a card for each claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import OWN, Claim
from fewbits.analysis.engine.claims.verdicts import FAMILIES
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import bounds, effect, number, p_value, size
from fewbits.analysis.views.trials import Trials
from fewbits.common.wording import plural

# Signs that distinguish outcomes without colour.
SIGNS: dict[str, str] = {
    Outcome.REPRODUCED: "✓",
    Outcome.IN_PART: "◐",
    Outcome.CONTRADICTED: "✗",
    Outcome.NOT_SEEN: "∅",
    Outcome.INCONCLUSIVE: "?",
    Outcome.NOT_RUN: "·",
    Outcome.OUT_OF_REACH: "–",
    Status.SUPPORTED: "✓",
    Status.OPPOSED: "✗",
    Status.ABSENT: "∅",
    Status.UNDECIDED: "?",
}
# Reach → title and description of the group of claims with this reach.
GROUPS = {
    "any": ("Exact claims", "These claims are checked by arithmetic or code, at any scale."),
    "mechanism": (
        "Mechanism claims",
        "These claims are about tensors of a trained network. They can be tested in any trained network that uses the "
        "mechanism. If the paper reports what it saw in one model, the claim names this model's size, and only runs "
        "with at least half of its parameters and tokens can contradict it.",
    ),
    "outcome": (
        "Training claims",
        "These claims are about losses at a stated number of parameters and tokens. Only runs with at least half of "
        "both numbers can contradict them.",
    ),
}
FEW = 4  # for a claim with more comparisons than this, a summary shows only how many are supported


@dataclass(frozen=True)
class ClaimGroup:
    """The claims of one reach, with the group's title and description."""

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
    mde: str = ""  # minimum detectable effect
    margin: str = ""  # the margin, or the bounds of a test that has bounds instead
    weak: bool = False  # undecided, and the minimum detectable effect exceeds the margin
    p: str = ""
    reason: str = ""


def badge(outcome: Outcome | Status) -> Markup:
    """Return the label of a claim's outcome or of a comparison's status as HTML, with a sign and a colour."""
    kind = {Status.SUPPORTED: "reproduced", Status.OPPOSED: "contradicted", Status.UNDECIDED: "inconclusive"}
    name = kind.get(outcome, outcome.value) if isinstance(outcome, Status) else outcome.value
    return render("badge", kind=name.replace(" ", "-"), sign=SIGNS.get(outcome, "–"), text=outcome.value)


def counts(verdicts: Mapping[str, Verdict]) -> str:
    """Return the number of verdicts of each outcome as text, for example `9 reproduced, 2 contradicted, …`."""
    numbers = Counter(verdict.outcome for verdict in verdicts.values())
    return ", ".join(f"{numbers[outcome]} {outcome}" for outcome in Outcome)


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
    """Return the claims in groups by reach (any, mechanism, outcome); groups without claims are missing."""
    claims = [verdict.claim for verdict in verdicts.values()]
    by_reach = [(text, tuple(claim for claim in claims if claim.reach == reach)) for reach, text in GROUPS.items()]
    return [ClaimGroup(*text, members) for text, members in by_reach if members]


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
        "shortfall": shortfall(verdict),
        "findings": findings if len(findings) <= FEW else [],
        "count": f"{supported} of {plural(len(verdict.findings), 'comparison')} supported"
        if len(findings) > FEW
        else "",
        "repeats": ", ".join(dict.fromkeys(one.repeats for one in findings if one.repeats)),
        "weak": verdict.underpowered,
        "controls": [(one.title, control_state(one)) for one in verdict.controls],
    }


def shortfall(verdict: Verdict) -> str:
    """Return how many comparisons of a claim that is reproduced in part count against "reproduced", and why.

    The text is empty for other verdicts.
    """
    if verdict.outcome is not Outcome.IN_PART:
        return ""
    missing = Counter(one.status for one in verdict.findings if one.name not in verdict.supported)
    words = {
        Status.SUPPORTED: "only before the correction for multiple tests",
        Status.OPPOSED: "opposed, by runs too small to contradict the claim",
    }
    return "; ".join(f"{missing[status]} {words.get(status, status.value)}" for status in Status if missing[status])


def card(verdict: Verdict, trials: Trials) -> Markup:
    """Return one claim as HTML, with its verdict, findings and controls, and links to its trials."""
    claim, leading = verdict.claim, verdict.leading
    stated = claim.stated
    return render(
        "claim",
        claim=claim,
        verdict=verdict,
        not_run=verdict.outcome is Outcome.NOT_RUN,
        kind=verdict.outcome.value.replace(" ", "-"),
        badge=badge(verdict.outcome),
        group=GROUPS[claim.reach][0].removesuffix("s").lower(),
        stated=f"{number(stated.parameters)} parameters, {number(stated.tokens)} tokens" if stated else "",
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
    interval, sign = finding.interval, finding.test not in OWN
    half = (interval.high - interval.low) / 2 if interval else None
    p_own = f"; with the pair's own spread {p_value(finding.p_own)}" if finding.p_own is not None else ""
    return FindingView(
        finding.heading,
        badge(finding.status),
        effect(finding.effect, half, finding.relative, sign=sign) if finding.effect is not None else "",
        bounds(interval.low, interval.high, finding.relative, sign=sign) if interval else "",
        glyph(finding),
        plural(finding.n, finding.unit) if finding.n else "",
        size(finding.mde, finding.relative) if finding.mde is not None else "",
        size(finding.margin, finding.relative) if finding.margin else finding.bound,
        finding.underpowered,
        f"{p_value(finding.p_for)}{p_own}" if finding.p_for is not None else "",
        finding.reason,
    )


def control_state(control: ControlResult) -> str:
    """Return the result of a control as text: `✓ passed`, `✗ failed` or `? not tested`."""
    return "✓ passed" if control.passed else "✗ failed" if control.tested else "? not tested"


def _margins(claim: Claim) -> list[str]:
    """Return the margins of a claim's parts and the bounds of their tests as texts, each with the reason for its size.

    The bounds of a test are the numbers with which it compares a measured value (`Part.bounds`).
    """
    margins = [margin for part in claim.parts if (margin := claim.margin_of(part)) is not None]
    shown = [f"{size(margin.value, margin.relative)}: {margin.reason}" for margin in margins]
    bounds = [f"{part.bounds}: {part.reason}" for part in claim.parts if part.reason]
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
    if finding.test in OWN:
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
