"""Combine the findings of each claim's comparisons into a verdict; p values are corrected over all claims of a report.

* `reproduced` needs every comparison to be supported; `reproduced in part` needs some of them.
* `contradicted` needs runs that are large and long enough compared with the paper's (`judging.covered`). If smaller or
  shorter runs show that an effect is absent, the verdict is `not seen at this scale`, which counts as undecided.
* A control that failed or has no data turns each of these verdicts into `inconclusive`.
* A claim is `not run` if the scale plans none of its comparisons, or does not plan the arms of its controls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import Claim
from fewbits.analysis.engine.statistics.estimates import ALPHA
from fewbits.analysis.engine.statistics.multiplicity import holm

MOST_REASONS = 3  # if there are more than MOST_REASONS + 1 reasons, a verdict's text lists only the first MOST_REASONS


# -------------------------------------------------------------------------------- one claim


@dataclass(frozen=True)
class Evidence:
    """The findings on a claim and its controls, before the p values are corrected over all claims of the report."""

    claim: Claim
    findings: tuple[Finding, ...]  # one for each comparison of the claim
    controls: tuple[ControlResult, ...] = ()
    covered: bool = True  # the runs are large and long enough to contradict the claim (`judging.covered`)
    scale: str = ""  # for example "3.3 M parameters, 0.33 M tokens"
    notes: tuple[str, ...] = ()
    smoke: bool = False  # the runs have the scale smoke: they are too short to say anything about training

    @property
    def p_for(self) -> float | None:
        """The p value of the test that supports the whole claim if p is small: the greatest `p_for` of its findings.

        None if a comparison is not run or out of reach, or if no finding has a p value.
        """
        if any(finding.status in (Status.NOT_RUN, Status.OUT_OF_REACH) for finding in self.findings):
            return None
        return max((finding.p_for for finding in self.findings if finding.p_for is not None), default=None)

    @property
    def least_p(self) -> float:
        """The least value that `p_for`, the p value for the claim, can have with the planned number of runs."""
        return max((finding.least_p for finding in self.findings), default=0.0)

    @property
    def p_against(self) -> float | None:
        """The p value of the test that contradicts the claim if p is small.

        If k comparisons have a p value against the claim and p is the least of these, the result is min(1, k · p). It
        is None if k = 0, or if the runs are too small or short to contradict the claim (see `covered`).
        """
        if not self.covered:
            return None
        values = [p for finding in self.findings if (p := _p_contradicts(finding)) is not None]
        return min(1.0, len(values) * min(values)) if values else None

    @property
    def contradicting(self) -> tuple[Finding, ...]:
        """The findings that contradict the claim, before correction; () if the runs are too small (see `covered`)."""
        return tuple(finding for finding in self.findings if self.covered and _contradicts(finding))

    @property
    def has_parts(self) -> bool:
        """True if the claim has several comparisons."""
        return len(self.findings) > 1


def _contradicts(finding: Finding) -> bool:
    return finding.status is Status.OPPOSED or (finding.status is Status.ABSENT and finding.absence == "contradicts")


def _p_contradicts(finding: Finding) -> float | None:
    if finding.absence == "contradicts" and finding.p_absent is not None:
        # "The effect is smaller than the margin" is also true for effects with the opposite sign. So p_against,
        # the p value for the opposite sign, is not needed.
        return finding.p_absent
    return finding.p_against


# -------------------------------------------------------------------------------- all claims of a report


def conclude(evidence: Mapping[str, Evidence], alpha: float = ALPHA) -> dict[str, Verdict]:
    """Return the verdicts of a report, by claim id.

    p values are corrected for multiple tests within three families of tests: those that support whole claims, those
    that contradict claims, and those that support single comparisons (see FAMILIES). evidence: claim id → the findings
    on this claim. alpha: the significance level after correction.
    """
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
    verdicts = {}
    for name, one in evidence.items():
        kept = {
            part.name
            for part in one.findings
            if part.status is Status.SUPPORTED
            and (part.p_for is None or not one.has_parts or parts_p[name, part.name] <= alpha)
        }
        family = Family(whole_p.get(name, 0.0), len(whole), against_p.get(name, 0.0), len(against), frozenset(kept))
        verdicts[name] = _weakened_if_smoke(_controlled(_decide(one, family, alpha), one), one)
    return verdicts


K = TypeVar("K")


def _corrected(family: Mapping[K, tuple[float, float]]) -> dict[K, float]:
    """Return the p value of each test after Holm's correction over the tests of the family.

    family: test → (its p value, the least p value that it can have). Tests whose least p value is too large to become
    significant do not count in the correction (Tarone).
    """
    p = holm([p for p, _ in family.values()], [least for _, least in family.values()])
    return dict(zip(family, p, strict=True))


FAMILIES = (
    "(1) each whole claim holds: the greatest p value of its comparisons; (2) a claim is contradicted: the least p "
    "value against one of its comparisons, times their number; (3) a single comparison holds, of a claim with several. "
    "Each family is corrected by Holm's method at 5 %, without the tests whose p value cannot become small enough "
    "(Tarone). Controls are not corrected."
)


@dataclass(frozen=True)
class Family:
    """One claim's p values after correction, and the number of claims over which each of them was corrected."""

    p_for: float  # the corrected `Evidence.p_for`; 0 if the claim has none
    claims_for: int  # the number of claims over which p_for is corrected
    p_against: float  # the corrected `Evidence.p_against`; 0 if the claim has none
    claims_against: int  # the number of claims over which p_against is corrected
    kept: frozenset[str]  # the names of the findings that are supported after correction


def _decide(evidence: Evidence, family: Family, alpha: float) -> Verdict:
    statuses = {part.status for part in evidence.findings}
    verdict = Verdict(
        evidence.claim,
        Outcome.INCONCLUSIVE,
        "",
        evidence.findings,
        evidence.controls,
        evidence.covered,
        evidence.scale,
        evidence.p_for,
        evidence.p_against,
        tuple(part.name for part in evidence.findings if part.name in family.kept),
        evidence.notes,
    )
    if statuses == {Status.OUT_OF_REACH}:
        return replace(verdict, outcome=Outcome.OUT_OF_REACH, reason=evidence.findings[0].reason)
    if statuses <= {Status.OUT_OF_REACH, Status.NOT_RUN}:
        ours = next(part for part in evidence.findings if part.status is Status.NOT_RUN)
        return replace(verdict, outcome=Outcome.NOT_RUN, reason=ours.reason)
    if wrong := evidence.contradicting:
        certain = any(part.p_against is None for part in wrong)  # exact checks have no p value and need no correction
        if certain or family.p_against <= alpha:
            return replace(verdict, outcome=Outcome.CONTRADICTED, reason=_reasons(wrong), supported=())
        reason = (
            f"contradicted before correction (p {evidence.p_against:.2g}), but not after the correction over "
            f"{family.claims_against} claims (Holm: p {family.p_against:.2g}); {_reasons(wrong)}"
        )
        return replace(verdict, reason=reason)
    if statuses == {Status.SUPPORTED} and family.p_for <= alpha:
        reason = (
            evidence.findings[0].reason
            if len(evidence.findings) == 1
            else f"all {len(evidence.findings)} parts are supported"
        )
        return replace(verdict, outcome=Outcome.REPRODUCED, reason=reason)
    telling = [part for part in evidence.findings if part.alone and part.name in family.kept]
    if evidence.has_parts and telling:
        others = [part for part in evidence.findings if part.name not in family.kept]
        alone = tuple(part for part in others if part.status is Status.SUPPORTED)
        rest = tuple(part for part in others if part.status is not Status.SUPPORTED)
        reason = f"supported: {_headings(part for part in evidence.findings if part.name in family.kept)}"
        if alone:
            reason += f". Supported alone, but not after the correction for several tests: {_headings(alone)}"
        if rest:
            reason += f". Not supported: {_reasons(rest)}"
        return replace(verdict, outcome=Outcome.IN_PART, reason=reason)
    holding = [part for part in evidence.findings if part.alone and part.status is Status.SUPPORTED]
    if holding:
        p, several = max(part.p_for or 0.0 for part in holding), len(holding) > 1
        reason = f"supported before correction (p {'at most ' if several else ''}{p:.2g}), but not after correction"
        if statuses == {Status.SUPPORTED}:
            reason += f" over {family.claims_for} claims (Holm: p {family.p_for:.2g})"
        return replace(verdict, reason=f"{reason}; {_reasons(tuple(holding))}", supported=())
    unseen = tuple(part for part in evidence.findings if part.status in (Status.OPPOSED, Status.ABSENT))
    if unseen:
        return replace(verdict, outcome=Outcome.NOT_SEEN, reason=_reasons(unseen), supported=())
    return replace(verdict, reason=_why_undecided(evidence.findings), supported=())


def _why_undecided(parts: tuple[Finding, ...]) -> str:
    if undecided := tuple(part for part in parts if part.status is Status.UNDECIDED):
        return _reasons(undecided)
    supported = tuple(part for part in parts if part.status is Status.SUPPORTED)
    others = tuple(part for part in parts if part not in supported)
    names = _headings(supported)
    return f"supported, but not sufficient without the other parts: {names}. Not supported: {_reasons(others)}"


def _headings(parts: Iterable[Finding]) -> str:
    return "; ".join(part.heading for part in parts)


def _controlled(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Return the verdict, changed to `inconclusive` or `not run` if a control of the claim did not pass.

    Only decided verdicts (`Outcome.decided`) and `not seen at this scale` can change. They become `inconclusive` if a
    control failed or could not be tested, but `not run` if the only reason is that the scale does not plan arms of the
    controls. `not seen at this scale` also becomes `inconclusive` if the claim has no control.
    """
    if not verdict.outcome.decided and verdict.outcome is not Outcome.NOT_SEEN:
        return verdict
    failed = [control for control in evidence.controls if not control.passed]
    if verdict.outcome is Outcome.NOT_SEEN and not evidence.controls:
        reason = f"no control shows that the mechanism was active; {verdict.reason}"
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason, supported=())
    if not failed:
        return verdict
    if {part.status for control in failed for part in control.findings} <= {Status.SUPPORTED, Status.NOT_RUN}:
        names = ", ".join(control.id for control in failed)
        reason = f"not run at this scale, because the arms of its controls are not run ({names})"
        return replace(verdict, outcome=Outcome.NOT_RUN, reason=reason, supported=())
    failures = "; ".join(
        f"control {control.id} {'failed' if control.tested else 'was not tested'} ({control.title}: "
        f"{_reasons(tuple(part for part in control.findings if part.status is not Status.SUPPORTED))})"
        for control in failed
    )
    reason = f"{failures}; without this control the verdict would be: {verdict.outcome}, {verdict.reason}"
    return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason, supported=())


def _weakened_if_smoke(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Return the verdict; make it `inconclusive` if the claim is about losses and the scale is smoke (few steps)."""
    if not evidence.smoke or evidence.claim.reach != "outcome":
        return verdict
    if not verdict.outcome.decided and verdict.outcome is not Outcome.NOT_SEEN:
        return verdict
    reason = (
        "runs of a few steps (scale smoke) say nothing about training; otherwise the verdict would be: "
        f"{verdict.outcome}, {verdict.reason}"
    )
    return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason, supported=())


def _reasons(parts: tuple[Finding, ...]) -> str:
    """Return the findings' reasons as one text: all of them, or the first MOST_REASONS and the number of the rest."""
    if len(parts) == 1 and not parts[0].name:
        return parts[0].reason
    shown = parts if len(parts) <= MOST_REASONS + 1 else parts[:MOST_REASONS]
    others = f"; and {len(parts) - len(shown)} more" if len(shown) < len(parts) else ""
    return "; ".join(f"{part.heading}: {part.reason}" for part in shown) + others
