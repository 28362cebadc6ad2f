"""Findings and verdicts as data: what a comparison shows, and what a report says of a claim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fewbits.analysis.engine.claims import Claim
from fewbits.analysis.engine.statistics import Interval


class Outcome(StrEnum):
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
    """What one comparison shows."""

    SUPPORTED = "supported"
    OPPOSED = "opposed"  # shown on the other side
    ABSENT = "absent"  # shown to be smaller than the margin
    UNDECIDED = "undecided"
    NOT_RUN = "not run"
    OUT_OF_REACH = "out of reach"


@dataclass(frozen=True)
class Finding:
    """What one comparison of a claim shows. A p is None where nothing was tested."""

    name: str  # the key, with the ids of arms
    status: Status
    reason: str
    test: str = ""
    effect: float | None = None
    interval: Interval | None = None  # of level 1 - 2 ALPHA
    n: int = 0
    unit: str = "seed"  # of n
    mde: float | None = None  # minimum detectable effect
    margin: float | None = None
    relative: bool = False  # effect, interval, mde and margin are parts of the baseline's level
    p_for: float | None = None
    p_against: float | None = None
    p_absent: float | None = None  # that the effect is smaller than the margin
    p_own: float | None = None  # p_for by these pairs alone, where the spread of other arms was used too
    least_p: float = 0.0  # the least p_for that this design can reach
    absence: str = ""  # what ABSENT means: contradicts or not-seen
    alone: bool = True  # it says something without the claim's other parts
    title: str = ""  # the name with the labels of arms
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """What readers see in place of the name."""
        return self.title or self.name

    @property
    def tested(self) -> bool:
        """Whether there were data of enough seeds. What holds of every trial is observed and has no p."""
        return self.p_for is not None or self.status in (Status.SUPPORTED, Status.OPPOSED)

    @property
    def underpowered(self) -> bool:
        """Undecided, and an effect of the margin's size would be missed."""
        undecided = self.status is Status.UNDECIDED
        return undecided and self.mde is not None and bool(self.margin) and self.mde > (self.margin or 0.0)

    def shown(self, value: float) -> str:
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class ControlResult:
    """Whether a claim's runs show an effect that has to be there."""

    id: str
    title: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(one.status is Status.SUPPORTED for one in self.findings)

    @property
    def tested(self) -> bool:
        return all(one.tested for one in self.findings)


@dataclass(frozen=True)
class Verdict:
    """What a report says of a claim."""

    claim: Claim
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()
    controls: tuple[ControlResult, ...] = ()
    covered: bool = True  # the runs are as large and as long as where the paper saw it, or that does not matter
    scale: str = ""  # "3.3 M parameters, 0.33 M tokens"
    p_for: float | None = None  # that the whole claim holds: the greatest of its parts'
    p_against: float | None = None  # that a part is contradicted, corrected for their number
    supported: tuple[str, ...] = ()  # names of parts, after correction
    notes: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(trial for one in self.findings for trial in one.trials))

    @property
    def leading(self) -> Finding | None:
        """The finding whose effect a summary shows: the one that decides, else the least certain that was tested."""
        tested = [one for one in self.findings if one.effect is not None]
        return max(tested, key=lambda one: one.p_for if one.p_for is not None else 1.0, default=None)

    @property
    def underpowered(self) -> bool:
        undecided = self.outcome in (Outcome.INCONCLUSIVE, Outcome.NOT_SEEN)
        return undecided and any(one.underpowered for one in self.findings)

    def __str__(self) -> str:
        at = f" at {self.scale}" if self.scale and self.outcome.decided else ""
        return f"{self.outcome}{at}: {self.reason}"
