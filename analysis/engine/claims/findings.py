"""The dataclasses of results: a Finding is the result of one comparison, a Verdict the result of a whole claim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fewbits.analysis.engine.claims.schema import Claim, Kind
from fewbits.analysis.engine.statistics import Interval


class Outcome(StrEnum):
    """The verdict of a claim; none is easier to get than its opposite."""

    REPRODUCED = "reproduced"  # all parts that could be tested hold, the primary part among them
    MIXED = "mixed"  # some parts hold, and some do not, or are not decided
    NOT_REPRODUCED = "not reproduced"  # the opposite of the primary part is shown, and no part holds
    CANNOT_TELL = "cannot tell"  # noise, too few seeds, a control that did not pass, or a test that nothing could fail
    NOT_TESTABLE = "not testable here"  # the claim needs more than these runs have
    NOT_RUN = "not run"

    @property
    def decided(self) -> bool:
        return self in (Outcome.REPRODUCED, Outcome.MIXED, Outcome.NOT_REPRODUCED)


class Status(StrEnum):
    """The result of one comparison."""

    SUPPORTED = "supported"
    OPPOSED = "opposed"  # the opposite of the statement is shown
    UNDECIDED = "undecided"  # no test is significant, or data are missing
    VACUOUS = "nothing here could fail it"
    NOT_TESTABLE = "not testable here"
    NOT_RUN = "not run"  # the arms are not planned at this scale


UNTESTED = (Status.VACUOUS, Status.NOT_TESTABLE, Status.NOT_RUN)


@dataclass(frozen=True)
class Finding:
    """The result of one comparison of a claim; a p value is None if there was no statistical test."""

    name: str  # the comparison's name, which contains the arms' names in the sweep files
    status: Status
    reason: str  # the numbers behind the status, or why there is no result
    test: str = ""  # one of schema.TESTS
    effect: float | None = None  # arm minus baseline, or the arm's own number; a mean over seeds
    interval: Interval | None = None  # the interval of the effect, at level 1 - 2 ALPHA
    n: int = 0  # the number of pairs or trials
    unit: str = "seed"  # the unit that n counts, for example "seed" or "trial"
    margin: float | None = None
    bound: str = ""  # the bounds of the test `within`, as text
    relative: bool = False  # effect, interval, margin and printed are fractions of the baseline's number
    p_for: float | None = None  # the p value of the test whose significant result supports the statement
    p_against: float | None = None  # the p value of the test whose significant result opposes the statement
    extra_tokens: float | None = None  # the effect on a loss as a fraction of the baseline's tokens
    extra_interval: Interval | None = None  # the interval of extra_tokens
    printed: float | None = None  # the paper's own effect
    title: str = ""  # the name with the arms' labels for readers
    part: int = 0  # the index of the part in the claim
    trials: tuple[str, ...] = ()  # ids
    notes: tuple[str, ...] = ()  # for example pairs that are missing

    @property
    def heading(self) -> str:
        return self.title or self.name

    @property
    def tested(self) -> bool:
        """True if a test or check was made; False if data were missing or there were too few seeds."""
        return self.p_for is not None or self.status in (Status.SUPPORTED, Status.OPPOSED)

    @property
    def p(self) -> float | None:
        """The p value of the direction for which there is more evidence, doubled, since there are two directions."""
        known = [p for p in (self.p_for, self.p_against) if p is not None]
        return min(1.0, 2 * min(known)) if known else None


@dataclass(frozen=True)
class ControlResult:
    """The result of a control: whether a claim's runs show a known effect."""

    id: str
    title: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.status is Status.SUPPORTED for finding in self.findings)

    @property
    def tested(self) -> bool:
        return all(finding.tested for finding in self.findings)


@dataclass(frozen=True)
class Verdict:
    """The verdict of one claim, with the findings from which it follows."""

    claim: Claim
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()  # one for each comparison of the claim
    controls: tuple[ControlResult, ...] = ()
    scale: str = ""  # the size of the runs in words, compared with the paper's
    primary: int = 0  # the index of the primary part
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.claim.kind

    @property
    def leading(self) -> Finding | None:
        """The finding whose effect a summary shows; None if no finding has an effect.

        It is the one of the primary part with the greatest p value. If that part has none, it is one of another part.
        """
        measured = (finding for finding in self.findings if finding.effect is not None)

        def rank(one: Finding) -> tuple[bool, bool, float]:
            return one.part == self.primary, one.interval is not None, 1.0 if one.p is None else one.p

        return max(measured, key=rank, default=None)
