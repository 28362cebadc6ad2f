"""Findings and verdicts as data: the result of a comparison, and the decision on a claim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fewbits.analysis.engine.claims.schema import Claim
from fewbits.analysis.engine.statistics.estimates import Interval


class Outcome(StrEnum):
    """The outcome of a claim's check."""

    REPRODUCED = "reproduced"
    IN_PART = "reproduced in part"
    CONTRADICTED = "contradicted"
    NOT_SEEN = "not seen at this scale"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run"
    OUT_OF_REACH = "out of reach"

    @property
    def decided(self) -> bool:
        return self in (Outcome.REPRODUCED, Outcome.IN_PART, Outcome.CONTRADICTED)


class Status(StrEnum):
    """The result of one comparison."""

    SUPPORTED = "supported"
    OPPOSED = "opposed"  # the opposite of the statement is shown
    ABSENT = "absent"  # the effect is shown to be smaller than the margin
    UNDECIDED = "undecided"
    NOT_RUN = "not run"
    OUT_OF_REACH = "out of reach"


@dataclass(frozen=True)
class Finding:
    """The result of one comparison of a claim. A p value is None if nothing was tested."""

    name: str  # the key, with the ids of arms
    status: Status
    reason: str
    test: str = ""
    effect: float | None = None
    interval: Interval | None = None  # at level 1 - 2 ALPHA
    n: int = 0
    unit: str = "seed"  # what n counts
    mde: float | None = None  # minimum detectable effect
    margin: float | None = None
    relative: bool = False  # effect, interval, mde and margin are fractions of the baseline's level
    p_for: float | None = None  # the p value of the test that supports the statement
    p_against: float | None = None  # the p value of the test that opposes it
    p_absent: float | None = None  # the p value of the test that the effect is smaller than the margin
    p_own: float | None = None  # p_for from these pairs alone, if the pooled spread of other arms was used
    least_p: float = 0.0  # the least p_for that this design can reach
    absence: str = ""  # what ABSENT means for the claim: contradicts or not-seen
    alone: bool = True  # the finding counts without the claim's other parts
    title: str = ""  # the name with the labels of arms
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Return what readers see instead of the name."""
        return self.title or self.name

    @property
    def tested(self) -> bool:
        """True if there were data of enough seeds, also for a check without inference, which has no p value."""
        return self.p_for is not None or self.status in (Status.SUPPORTED, Status.OPPOSED)

    @property
    def underpowered(self) -> bool:
        """True if the comparison is undecided and its minimum detectable effect exceeds the margin."""
        undecided = self.status is Status.UNDECIDED
        return undecided and self.mde is not None and bool(self.margin) and self.mde > (self.margin or 0.0)

    def shown(self, value: float) -> str:
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class ControlResult:
    """The result of a control: whether the runs of a claim show an effect that must be there."""

    id: str
    title: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.status is Status.SUPPORTED for finding in self.findings)

    @property
    def tested(self) -> bool:
        """Tell whether every part was tested: no data were missing and the seeds were enough."""
        return all(finding.tested for finding in self.findings)


@dataclass(frozen=True)
class Verdict:
    """The decision on a claim, with the findings that it rests on."""

    claim: Claim
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()
    controls: tuple[ControlResult, ...] = ()
    covered: bool = True  # the runs are large and long enough to contradict the claim (`judging.covered`)
    scale: str = ""  # for example "3.3 M parameters, 0.33 M tokens"
    p_for: float | None = None  # p that the whole claim holds: the greatest p_for of its parts
    p_against: float | None = None  # p that a part is contradicted, corrected for the number of parts
    supported: tuple[str, ...] = ()  # names of the parts that are supported after correction
    notes: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(trial for finding in self.findings for trial in finding.trials))

    @property
    def leading(self) -> Finding | None:
        """The finding whose effect a summary shows: of those with an effect, the one with the greatest p_for."""
        measured = [finding for finding in self.findings if finding.effect is not None]
        return max(measured, key=lambda one: one.p_for if one.p_for is not None else 1.0, default=None)

    @property
    def underpowered(self) -> bool:
        undecided = self.outcome in (Outcome.INCONCLUSIVE, Outcome.NOT_SEEN)
        return undecided and any(finding.underpowered for finding in self.findings)

    def __str__(self) -> str:
        at = f" at {self.scale}" if self.scale and self.outcome.decided else ""
        return f"{self.outcome}{at}: {self.reason}"
