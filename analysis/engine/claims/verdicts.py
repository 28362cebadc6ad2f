"""Combine the findings of each claim's comparisons into a verdict; p values are corrected over all claims of a report.

The rules, of which the first one that fits decides:

* no part is planned at this scale, or none has data because its trials are unfinished: `not run`;
* none can be tested with these runs: `not testable here`;
* 2 to 5 seeds, or one at a scale that plans more: `cannot tell`; effects and intervals are still shown;
* the primary part could not be tested, or nothing could fail it: `cannot tell`;
* all parts that could be tested hold: `reproduced`; some do: `mixed`;
* the opposite of the primary part is shown, and no part holds: `not reproduced`; else `cannot tell`.

A control that did not pass turns `reproduced`, `mixed` and `not reproduced` into `cannot tell`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fewbits.analysis.engine.claims.findings import UNTESTED, ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import Claim, Kind
from fewbits.analysis.engine.statistics import ALPHA, adjusted
from fewbits.common.wording import plural

MIN_SEEDS = 6
MOST_REASONS = 3  # if there are more than MOST_REASONS + 1 reasons, a verdict's text lists only the first MOST_REASONS
FAMILIES = (
    "Primary parts of the paper's main claims, which paper.yaml names beforehand, are corrected together by Holm's "
    "method; the other comparisons of the paper's claims by that of Benjamini and Hochberg; those of our own findings "
    "by the latter, too, among themselves. The level is 5 %, for both directions together. Controls are not corrected."
)


@dataclass(frozen=True)
class Evidence:
    """The findings on a claim and its controls, before the p values are corrected over all claims of the report."""

    claim: Claim
    findings: tuple[Finding, ...]  # one for each comparison of the claim
    controls: tuple[ControlResult, ...] = ()
    scale: str = ""
    primary: int = 0  # the index of the primary part
    main: bool = False  # the primary part is corrected by Holm's method (`primary` in paper.yaml)
    one_run: bool = False  # the scale plans one run of each arm, so one is enough
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # unfinished trials, without which no comparison has data

    @property
    def tested_primary(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.part == self.primary and finding.p is not None]

    @property
    def holm_p(self) -> float | None:
        """The p value of the primary part, if it is in Holm's family and has one.

        All its comparisons support it (the greatest p for it counts), or one opposes it (the least p, times their
        number).
        """
        parts = self.tested_primary
        if not self.main or not parts:
            return None
        supported = max(2 * (1.0 if part.p_for is None else part.p_for) for part in parts)
        opposed = len(parts) * min(2 * (1.0 if part.p_against is None else part.p_against) for part in parts)
        return min(1.0, supported, opposed)

    @property
    def holm_places(self) -> list[int]:
        """The places of the findings that Holm's method corrects.

        There are none if some comparisons of the primary part are supported, and others are undecided: Holm's method
        then says nothing about the former, so they are corrected with the other comparisons.
        """
        statuses = {part.status for part in self.tested_primary}
        whole = not {Status.SUPPORTED, Status.UNDECIDED} <= statuses or Status.OPPOSED in statuses
        chosen = self.holm_p is not None and whole
        return [place for place, finding in enumerate(self.findings) if chosen and finding.part == self.primary]


def conclude(evidence: Mapping[str, Evidence], alpha: float = ALPHA) -> dict[str, Verdict]:
    """Return the verdicts of a report, by claim id. evidence: claim id → the findings on this claim."""
    corrected = _corrected(evidence, alpha)
    return {name: _controlled(_decide(one, corrected[name]), one) for name, one in evidence.items()}


# -------------------------------------------------------------------------------- the correction for many tests


def _corrected(evidence: Mapping[str, Evidence], alpha: float) -> dict[str, tuple[Finding, ...]]:
    """Return by claim id the findings, of which those that are not significant after correction are UNDECIDED."""
    holm = {name: p for name, one in evidence.items() if (p := one.holm_p) is not None}
    found = {name: list(one.findings) for name, one in evidence.items()}
    for name, p in zip(holm, adjusted(list(holm.values()), "holm"), strict=True):
        for place in evidence[name].holm_places:
            found[name][place] = _weakened(found[name][place], p, alpha, f"Holm over {len(holm)}")
    for kind in Kind:
        rest = [
            (name, place, finding.p)
            for name, one in evidence.items()
            for place, finding in enumerate(one.findings)
            if one.claim.kind is kind and finding.p is not None and place not in one.holm_places
        ]
        for (name, place, _), p in zip(rest, adjusted([p for *_, p in rest], "fdr_bh"), strict=True):
            found[name][place] = _weakened(found[name][place], p, alpha, f"Benjamini-Hochberg over {len(rest)}")
    return {name: tuple(findings) for name, findings in found.items()}


def _weakened(finding: Finding, p: float, alpha: float, words: str) -> Finding:
    """Return the finding; it is UNDECIDED if its corrected p value exceeds alpha."""
    if p <= alpha or finding.status not in (Status.SUPPORTED, Status.OPPOSED) or finding.p is None:
        return finding
    reason = f"{finding.reason}; {finding.status} before, but not after the correction ({words}: p {p:.2g})"
    return replace(finding, status=Status.UNDECIDED, reason=reason)


# -------------------------------------------------------------------------------- one claim


def _decide(evidence: Evidence, findings: tuple[Finding, ...]) -> Verdict:
    def verdict(outcome: Outcome, reason: str) -> Verdict:
        known = evidence.controls, evidence.scale, evidence.primary, evidence.notes
        return Verdict(evidence.claim, outcome, reason, findings, *known)

    statuses, missing = {part.status for part in findings}, evidence.missing
    if missing:
        more = f"; and {len(missing) - MOST_REASONS} more" if len(missing) > MOST_REASONS else ""
        listed = "; ".join(missing[:MOST_REASONS]) + more
        return verdict(Outcome.NOT_RUN, f"{plural(len(missing), 'trial')} not finished: {listed}")
    if statuses == {Status.NOT_RUN}:
        return verdict(Outcome.NOT_RUN, findings[0].reason)
    if statuses <= {Status.NOT_RUN, Status.NOT_TESTABLE}:
        needed = next(part for part in findings if part.status is Status.NOT_TESTABLE)
        return verdict(Outcome.NOT_TESTABLE, needed.reason)
    primary = [part for part in findings if part.part == evidence.primary]
    holding = [part for part in findings if part.status is Status.SUPPORTED]
    failing = [part for part in findings if part.status in (Status.OPPOSED, Status.UNDECIDED)]
    untested = [part for part in findings if part.status in UNTESTED]
    named = f". Not tested: {_reasons(untested)}" if untested else ""
    few = [part for part in (*holding, *failing) if 0 < part.n < MIN_SEEDS and part.test != "exact"]
    if few and not evidence.one_run:
        seeds = plural(min(part.n for part in few), few[0].unit)
        return verdict(Outcome.CANNOT_TELL, f"{seeds}; six are needed. {_reasons(few)}")
    if all(part.status in UNTESTED for part in primary):
        others = f". The others: {_reasons([*holding, *failing])}" if holding or failing else ""
        return verdict(Outcome.CANNOT_TELL, f"{_reasons(primary)}{others}")
    if not failing:
        every = "the test holds" if len(holding) == 1 else f"all {len(holding)} tests hold"
        reason = holding[0].reason if len(findings) == 1 else f"{every}: {_reasons(holding)}"
        return verdict(Outcome.REPRODUCED, reason + named)
    if holding:
        headings = "; ".join(part.heading for part in holding)
        opposed = [part for part in failing if part.status is Status.OPPOSED]
        rest = [part for part in failing if part.status is Status.UNDECIDED]
        each = [f"{words}: {_reasons(parts)}" for words, parts in (("Does not", opposed), ("Undecided", rest)) if parts]
        return verdict(Outcome.MIXED, f"holds: {headings}. {'. '.join(each)}{named}")
    contrary = any(part.status is Status.OPPOSED for part in primary)
    return verdict(Outcome.NOT_REPRODUCED if contrary else Outcome.CANNOT_TELL, _reasons(failing) + named)


def _controlled(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Return the verdict; change it to `cannot tell` if it is decided and a control of the claim did not pass."""
    failed = [control for control in evidence.controls if not control.passed]
    if not verdict.outcome.decided or not failed:
        return verdict
    failures = "; ".join(
        f"control {control.id} {'failed' if control.tested else 'was not tested'} ({control.title}: "
        f"{_reasons([part for part in control.findings if part.status is not Status.SUPPORTED])})"
        for control in failed
    )
    reason = f"{failures}; without this control the verdict would be: {verdict.outcome}, {verdict.reason}"
    return replace(verdict, outcome=Outcome.CANNOT_TELL, reason=reason)


def _reasons(parts: list[Finding]) -> str:
    """Return the findings' reasons as one text: the first MOST_REASONS and the number of the rest."""
    if len(parts) == 1 and not parts[0].name:
        return parts[0].reason
    shown = parts if len(parts) <= MOST_REASONS + 1 else parts[:MOST_REASONS]
    others = f"; and {len(parts) - len(shown)} more" if len(shown) < len(parts) else ""
    return "; ".join(f"{part.heading}: {part.reason}" for part in shown) + others
