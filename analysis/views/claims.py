"""Claims and their verdicts: the tables at the top of a report, and each claim in full where the paper makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from fewbits.analysis.engine.claims import OWN, Claim, Margin
from fewbits.analysis.engine.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.verdicts import FAMILIES
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import bounds, effect, number, p_value, plural, size
from fewbits.analysis.views.trials import Trials

SIGNS: dict[str, str] = {  # told apart without colour
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
GROUPS = {  # by reach
    "any": ("Exact claims", "Arithmetic and code decide them, at any scale."),
    "mechanism": ("Mechanism claims", "About tensors of a trained network: any network that has what they speak of."),
    "outcome": (
        "Training claims",
        "About losses at a stated size and number of tokens. Only runs at least half as large contradict them.",
    ),
}
FEW = 4  # comparisons that a summary shows one by one


@dataclass(frozen=True)
class ClaimGroup:
    """The claims of one reach."""

    title: str
    about: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class FindingView:
    """One comparison, in words."""

    name: str
    badge: Markup
    effect: str = ""
    bounds: str = ""
    glyph: Markup | str = ""
    repeats: str = ""
    mde: str = ""
    margin: str = ""
    weak: bool = False
    p: str = ""
    reason: str = ""


def badge(outcome: Outcome | Status) -> Markup:
    """Return an outcome as a label with a sign and a colour."""
    kind = {Status.SUPPORTED: "reproduced", Status.OPPOSED: "contradicted", Status.UNDECIDED: "inconclusive"}
    name = kind.get(outcome, outcome.value) if isinstance(outcome, Status) else outcome.value
    return render("badge", kind=name.replace(" ", "-"), sign=SIGNS.get(outcome, "–"), text=outcome.value)


def counts(verdicts: Mapping[str, Verdict]) -> str:
    """Return the tally in words: `9 reproduced, 2 contradicted, …`."""
    found = Counter(verdict.outcome for verdict in verdicts.values())
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in Outcome)


def tally(verdicts: Iterable[Verdict], *, zeros: bool = True) -> Markup:
    """Return how many verdicts there are of each outcome; zeros: of those that none has, too."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return render("tally", counts=[(found[one], badge(one)) for one in Outcome if zeros or found[one]])


def rules() -> Markup:
    """Return how claims are judged."""
    return render("rules", families=FAMILIES)


def groups(verdicts: Mapping[str, Verdict]) -> list[ClaimGroup]:
    """Return the claims by reach: exact, mechanism, training."""
    claims = [verdict.claim for verdict in verdicts.values()]
    found = [(text, tuple(claim for claim in claims if claim.reach == reach)) for reach, text in GROUPS.items()]
    return [ClaimGroup(*text, those) for text, those in found if those]


def summary(verdicts: Mapping[str, Verdict]) -> Markup:
    """Return a table of verdicts for each group of claims."""
    shown = [
        (
            group,
            tally((verdicts[claim.id] for claim in group.claims), zeros=False),
            [_row(verdicts[claim.id]) for claim in group.claims],
        )
        for group in groups(verdicts)
    ]
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
        "weak": verdict.underpowered,
        "controls": [(one.title, control_state(one)) for one in verdict.controls],
    }


def card(verdict: Verdict, trials: Trials) -> Markup:
    """Return one claim in full."""
    claim, leading = verdict.claim, verdict.leading
    stated = claim.stated
    return render(
        "claim",
        claim=claim,
        verdict=verdict,
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
    """Return a finding in words."""
    interval, sign = finding.interval, finding.test not in OWN
    half = (interval.high - interval.low) / 2 if interval else None
    p_own = f", from its own pairs {p_value(finding.p_own)}" if finding.p_own is not None else ""
    return FindingView(
        finding.heading,
        badge(finding.status),
        effect(finding.effect, half, finding.relative, sign=sign) if finding.effect is not None else "",
        bounds(interval.low, interval.high, finding.relative, sign=sign) if interval else "",
        glyph(finding),
        plural(finding.n, finding.unit) if finding.n else "",
        size(finding.mde, finding.relative) if finding.mde is not None else "",
        size(finding.margin, finding.relative) if finding.margin else "",
        finding.underpowered,
        f"{p_value(finding.p_for)}{p_own}" if finding.p_for is not None else "",
        finding.reason,
    )


def control_state(control: ControlResult) -> str:
    """Return whether a control passed, in words."""
    return "✓ passed" if control.passed else "✗ failed" if control.tested else "? not tested"


def _margins(claim: Claim) -> list[str]:
    """Return the margins of a claim and of its parts, each with its reason."""
    found: dict[Margin, None] = {}
    for part in claim.parts:
        if (margin := claim.margin_of(part)) is not None:
            found[margin] = None
    return [f"{size(margin.value, margin.relative)}: {margin.reason}" for margin in found]


# -------------------------------------------------------------------------------- an interval as a picture

WIDTH, HEIGHT, REACH = 120.0, 16.0, 2.5  # REACH: margins on either side of zero


def glyph(finding: Finding) -> Markup:
    """Return the interval beside zero and the margin, drawn in the colour of the text."""
    if finding.effect is None or finding.interval is None:
        return Markup()
    low, high = finding.interval.low, finding.interval.high
    margin = finding.margin if finding.test not in OWN else None
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
        title=shown + (f", shaded: within the margin of {size(margin, finding.relative)}" if margin else ""),
    )
