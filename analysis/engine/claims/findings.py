"""The dataclasses of results: a Finding is the result of one comparison, a Verdict the result of a whole claim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fewbits.analysis.engine.claims.schema import Claim
from fewbits.analysis.engine.statistics.estimates import Interval


class Outcome(StrEnum):
    """The verdict of a claim as a word or phrase; the section Report of README.md explains each."""

    REPRODUCED = "reproduced"
    IN_PART = "reproduced in part"
    CONTRADICTED = "contradicted"
    NOT_SEEN = "not seen at this scale"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run"
    OUT_OF_REACH = "out of reach"

    @property
    def decided(self) -> bool:
        """True if the claim is reproduced, reproduced in part or contradicted."""
        return self in (Outcome.REPRODUCED, Outcome.IN_PART, Outcome.CONTRADICTED)


class Status(StrEnum):
    """The result of one comparison in one word or phrase; a claim's verdict has an Outcome instead."""

    SUPPORTED = "supported"  # the statement is shown
    OPPOSED = "opposed"  # the opposite of the statement is shown, for example an effect with the opposite sign
    ABSENT = "absent"  # a stated effect is shown to be smaller than the margin
    UNDECIDED = "undecided"  # no test is significant, or data are missing
    NOT_RUN = "not run"  # the arms are not planned at this scale
    OUT_OF_REACH = "out of reach"  # no scale of ours, or not this scale, can test the comparison


@dataclass(frozen=True)
class Finding:
    """The result of one comparison of a claim. A p value is None if there was no statistical test."""

    name: str  # the comparison's name, which contains the arms' names in the sweep files
    status: Status
    reason: str  # the numbers behind the status, or why there is no result
    test: str = ""  # one of schema.TESTS
    effect: float | None = None  # arm minus baseline, or the arm's own number; a mean over seeds
    interval: Interval | None = None  # the interval of the effect, at level 1 - 2 ALPHA
    n: int = 0  # the number of pairs or trials
    unit: str = "seed"  # the unit that n counts, for example "seed" or "trial"
    mde: float | None = None  # minimum detectable effect
    margin: float | None = None
    bound: str = ""  # the bounds of the tests within, above and below, as text
    relative: bool = False  # effect, interval, mde and margin are fractions of the baseline's number
    p_for: float | None = None  # the p value of the test whose significant result supports the statement
    p_against: float | None = None  # the p value of the test whose significant result opposes the statement
    p_absent: float | None = None  # the p value of the test that the effect is smaller than the margin
    p_own: float | None = None  # p_for with these pairs' own spread, if p_for uses a spread pooled over other arms
    least_p: float = 0.0  # the least p_for that is possible with this number of seeds or events
    absence: str = ""  # the consequence of ABSENT for the claim: "contradicts" or "not-seen"
    alone: bool = True  # False: this finding supports the claim only together with other findings
    title: str = ""  # the name with the arms' labels for readers
    trials: tuple[str, ...] = ()  # ids
    notes: tuple[str, ...] = ()  # for example pairs that are missing

    @property
    def heading(self) -> str:
        """The name that reports show: the title, or `name` if the title is empty."""
        return self.title or self.name

    @property
    def tested(self) -> bool:
        """True if a test or check was made; False if data were missing or there were too few seeds."""
        return self.p_for is not None or self.status in (Status.SUPPORTED, Status.OPPOSED)

    @property
    def underpowered(self) -> bool:
        """True if the comparison is undecided and its minimum detectable effect exceeds the margin."""
        undecided = self.status is Status.UNDECIDED
        return undecided and self.mde is not None and bool(self.margin) and self.mde > (self.margin or 0.0)

    def shown(self, value: float) -> str:
        """Return an effect or bound of this finding as text, in percent if the finding is relative."""
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class ControlResult:
    """The result of a control: whether a claim's runs show a known effect."""

    id: str
    title: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True if every comparison of the control is supported."""
        return all(finding.status is Status.SUPPORTED for finding in self.findings)

    @property
    def tested(self) -> bool:
        """True if every comparison of the control was tested (`Finding.tested`)."""
        return all(finding.tested for finding in self.findings)


@dataclass(frozen=True)
class Verdict:
    """The verdict of one claim, with the findings from which it follows."""

    claim: Claim
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()  # one for each comparison of the claim
    controls: tuple[ControlResult, ...] = ()
    covered: bool = True  # the runs are large and long enough to contradict the claim (`judging.covered`)
    scale: str = ""  # for example "3.3 M parameters, 0.33 M tokens"
    p_for: float | None = None  # `Evidence.p_for`, before the correction over all claims
    p_against: float | None = None  # `Evidence.p_against`, before the correction over all claims
    supported: tuple[str, ...] = ()  # names of the findings that are supported after correction
    notes: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[str, ...]:
        """The ids of the trials behind the findings, each once."""
        return tuple(dict.fromkeys(trial for finding in self.findings for trial in finding.trials))

    @property
    def leading(self) -> Finding | None:
        """The finding whose effect a summary shows: the one with the weakest support, that is, the greatest `p_for`.

        A finding without a p value `p_for` counts as p_for = 1. A finding that has an effect but no interval, for
        example of a single seed, is chosen only if no finding has an interval. None if no finding has an effect.
        """
        measured = [finding for finding in self.findings if finding.effect is not None]
        return max(measured, key=lambda one: (one.interval is not None, _p_for(one)), default=None)

    @property
    def underpowered(self) -> bool:
        """True if the claim is undecided and one of its comparisons is underpowered (`Finding.underpowered`)."""
        undecided = self.outcome in (Outcome.INCONCLUSIVE, Outcome.NOT_SEEN)
        return undecided and any(finding.underpowered for finding in self.findings)

    def __str__(self) -> str:
        at = f" at {self.scale}" if self.scale and self.outcome.decided else ""
        return f"{self.outcome}{at}: {self.reason}"


def _p_for(finding: Finding) -> float:
    return 1.0 if finding.p_for is None else finding.p_for
