"""Verdicts: from the findings of a claim's parts to what a report says of the claim.

`reproduced` needs every part; `contradicted` needs runs that cover where the paper saw it; an effect shown to be absent
elsewhere is `not seen at this scale`, which counts as undecided. A control that failed, or was not tested, makes any
decision inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fewbits.analysis.engine.claims import Claim
from fewbits.analysis.engine.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.multiplicity import holm
from fewbits.analysis.engine.statistics import ALPHA

MOST_REASONS = 3  # of a verdict that a report spells out


# -------------------------------------------------------------------------------- one claim


@dataclass(frozen=True)
class Evidence:
    """What the runs show of a claim, before claims are corrected for each other."""

    claim: Claim
    findings: tuple[Finding, ...]
    controls: tuple[ControlResult, ...] = ()
    covered: bool = True
    scale: str = ""
    notes: tuple[str, ...] = ()

    @property
    def p_for(self) -> float | None:
        """Return p that the claim holds whole, the worst of its parts'; None where that cannot be decided."""
        if any(one.status in (Status.NOT_RUN, Status.OUT_OF_REACH) for one in self.findings):
            return None
        return max((one.p_for for one in self.findings if one.p_for is not None), default=None)

    @property
    def least_p(self) -> float:
        return max((one.least_p for one in self.findings), default=0.0)

    @property
    def p_against(self) -> float | None:
        """Return p that a part is contradicted, corrected for their number; None where the runs do not reach so far."""
        if not self.covered:
            return None
        found = [p for one in self.findings if (p := _p_contradicts(one)) is not None]
        return min(1.0, len(found) * min(found)) if found else None

    @property
    def contradicting(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if self.covered and _contradicts(one))

    @property
    def has_parts(self) -> bool:
        return len(self.findings) > 1


def _contradicts(one: Finding) -> bool:
    return one.status is Status.OPPOSED or (one.status is Status.ABSENT and one.absence == "contradicts")


def _p_contradicts(one: Finding) -> float | None:
    if one.absence == "contradicts" and one.p_absent is not None:
        return one.p_absent  # whatever is on the other side of 0 is smaller than the margin, too
    return one.p_against


# -------------------------------------------------------------------------------- all claims of a report


def conclude(evidence: Mapping[str, Evidence], alpha: float = ALPHA) -> dict[str, Verdict]:
    """Return the verdicts of a report. Three families are corrected, each by Holm at alpha (`FAMILIES`)."""
    whole = {name: (p, one.least_p) for name, one in evidence.items() if (p := one.p_for) is not None}
    parts = {
        (name, part.name): (p, part.least_p)
        for name, one in evidence.items()
        if one.has_parts
        for part in one.findings
        if (p := part.p_for) is not None
    }
    against = {name: one.p_against for name, one in evidence.items() if one.p_against is not None}
    whole_p, parts_p = _corrected(whole), _corrected(parts)
    against_p = _corrected({name: (p, 0.0) for name, p in against.items()})
    found = {}
    for name, one in evidence.items():
        kept = {
            part.name
            for part in one.findings
            if part.status is Status.SUPPORTED
            and (part.p_for is None or not one.has_parts or parts_p[name, part.name] <= alpha)
        }
        family = Family(whole_p.get(name, 0.0), len(whole), against_p.get(name, 0.0), len(against), frozenset(kept))
        found[name] = _controlled(_decide(one, family, alpha), one)
    return found


K = TypeVar("K")


def _corrected(family: Mapping[K, tuple[float, float]]) -> dict[K, float]:
    """Return the corrected p of tests, given each one's p and the least that it can reach."""
    p = holm([p for p, _ in family.values()], [least for _, least in family.values()])
    return dict(zip(family, p, strict=True))


FAMILIES = (
    "claims that hold whole (the worst p of a claim's parts), claims that are contradicted (the best p of its parts, "
    "times their number), and single parts of claims with several; each family is corrected by Holm's method at 5 %, "
    "without the tests that cannot reach it (Tarone). Controls are not corrected."
)


@dataclass(frozen=True)
class Family:
    """A claim's corrected p beside the others'."""

    p_for: float
    claims_for: int
    p_against: float
    claims_against: int
    kept: frozenset[str]  # parts that survive


def _decide(one: Evidence, family: Family, alpha: float) -> Verdict:
    statuses = {part.status for part in one.findings}
    verdict = Verdict(
        one.claim,
        Outcome.INCONCLUSIVE,
        "",
        one.findings,
        one.controls,
        one.covered,
        one.scale,
        one.p_for,
        one.p_against,
        tuple(part.name for part in one.findings if part.name in family.kept),
        one.notes,
    )
    if statuses == {Status.OUT_OF_REACH}:
        return replace(verdict, outcome=Outcome.OUT_OF_REACH, reason=one.findings[0].reason)
    if statuses <= {Status.OUT_OF_REACH, Status.NOT_RUN}:
        ours = next(part for part in one.findings if part.status is Status.NOT_RUN)
        return replace(verdict, outcome=Outcome.NOT_RUN, reason=ours.reason)
    if wrong := one.contradicting:
        certain = any(part.p_against is None for part in wrong)  # by arithmetic
        if certain or family.p_against <= alpha:
            return replace(verdict, outcome=Outcome.CONTRADICTED, reason=_reasons(wrong), supported=())
        reason = (
            f"alone contradicted (p {one.p_against:.2g}), not among {family.claims_against} claims tested together "
            f"(Holm: p {family.p_against:.2g}); {_reasons(wrong)}"
        )
        return replace(verdict, reason=reason)
    if statuses == {Status.SUPPORTED} and family.p_for <= alpha:
        reason = one.findings[0].reason if len(one.findings) == 1 else f"all {len(one.findings)} parts"
        return replace(verdict, outcome=Outcome.REPRODUCED, reason=reason)
    saying = [part for part in one.findings if part.alone and part.name in family.kept]
    if one.has_parts and saying:
        others = tuple(part for part in one.findings if part.name not in family.kept)
        held = "; ".join(part.heading for part in one.findings if part.name in family.kept)
        reason = f"{held}. Not: {_reasons(others)}"
        return replace(verdict, outcome=Outcome.IN_PART, reason=reason)
    holding = [part for part in one.findings if part.alone and part.status is Status.SUPPORTED]
    if holding:
        reason = f"alone supported (p {holding[0].p_for or 0.0:.2g}), not after correction"
        if statuses == {Status.SUPPORTED}:
            reason += f" among {family.claims_for} claims (Holm: p {family.p_for:.2g})"
        return replace(verdict, reason=f"{reason}; {_reasons(tuple(holding))}", supported=())
    unseen = tuple(part for part in one.findings if part.status in (Status.OPPOSED, Status.ABSENT))
    if unseen:
        return replace(verdict, outcome=Outcome.NOT_SEEN, reason=_reasons(unseen), supported=())
    return replace(verdict, reason=_why_undecided(one.findings), supported=())


def _why_undecided(parts: tuple[Finding, ...]) -> str:
    if undecided := tuple(part for part in parts if part.status is Status.UNDECIDED):
        return _reasons(undecided)
    supported = tuple(part for part in parts if part.status is Status.SUPPORTED)
    others = tuple(part for part in parts if part not in supported)
    names = "; ".join(part.heading for part in supported)
    return f"supported, but without the other parts this says nothing: {names}. Not: {_reasons(others)}"


def _controlled(verdict: Verdict, one: Evidence) -> Verdict:
    """Return the verdict, inconclusive if the runs do not show that they would have found an effect."""
    if not verdict.outcome.decided and verdict.outcome is not Outcome.NOT_SEEN:
        return verdict
    failed = [control for control in one.controls if not control.passed]
    if verdict.outcome is Outcome.NOT_SEEN and not one.controls:
        reason = f"no control shows that the mechanism was active; {verdict.reason}"
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason, supported=())
    if not failed:
        return verdict
    told = "; ".join(
        f"control {control.id} {'failed' if control.tested else 'was not tested'} ({control.title}: "
        f"{_reasons(tuple(part for part in control.findings if part.status is not Status.SUPPORTED))})"
        for control in failed
    )
    reason = f"{told}; without it: {verdict.outcome}, {verdict.reason}"
    return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason, supported=())


def _reasons(parts: tuple[Finding, ...]) -> str:
    """Return the reasons of these parts; of many, the first ones and the number of the others."""
    if len(parts) == 1 and not parts[0].name:
        return parts[0].reason
    shown = parts if len(parts) <= MOST_REASONS + 1 else parts[:MOST_REASONS]
    others = f"; and {len(parts) - len(shown)} more" if len(shown) < len(parts) else ""
    return "; ".join(f"{part.heading}: {part.reason}" for part in shown) + others
