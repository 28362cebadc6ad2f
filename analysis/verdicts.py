"""Verdicts: what paired results say of a claim, and no more than they say.

Every decision has two one-sided tests at ALPHA, one for the claim and one against it, and is read off the interval of
level 1 - 2 ALPHA: a claim is `reproduced` or `contradicted` where the interval lies wholly on one side of what it says,
else `inconclusive`. A null ("no worse", "equal") is shown by an equivalence test and needs a design that could have
found a difference of the margin: an underpowered null is inconclusive. A claim with a positive control that failed, or
has no data, is inconclusive. Of many claims, those are kept that survive Holm's correction, for and against apart: over
a whole report a false `reproduced` is no likelier than ALPHA, nor is a false `contradicted`.

Differences are ours minus baseline, pair by pair. An arm that diverges counts as higher than any loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.multiplicity import holm, more_events
from fewbits.analysis.engine.power import minimum_detectable_effect, required_n
from fewbits.analysis.engine.statistics import (
    ALPHA,
    Interval,
    Side,
    Summary,
    summary,
    t_test,
)

SEEDS = 200  # beyond which a design is only called too small, not how much


class Outcome(StrEnum):
    REPRODUCED = "reproduced"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"
    OUT_OF_REACH = "out of reach"


@dataclass(frozen=True)
class Control:
    """What a claim's runs must show before they may decide it: that a known effect is found."""

    name: str
    passed: bool
    detail: str
    trials: tuple[str, ...] = ()
    tested: bool = True  # else there were too few seeds, or no data

    @staticmethod
    def of(name: str, verdict: Verdict) -> Control:
        """Passed where the known effect is itself reproduced."""
        tested = verdict.p_for is not None or verdict.outcome in (Outcome.REPRODUCED, Outcome.CONTRADICTED)
        return Control(name, verdict.outcome is Outcome.REPRODUCED, verdict.reason, verdict.trials, tested)


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str
    effect: float | None = None
    interval: Interval | None = None
    n: int = 0  # seeds, or of whatever else there are several
    unit: str = "seed"  # of n
    mde: float | None = None  # minimum detectable effect of the comparison
    margin: float | None = None
    relative: bool = False  # effect, interval, mde and margin are parts of the baseline's level
    p_for: float | None = None  # None: nothing was tested (exact, out of reach, no data)
    p_against: float | None = None
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scale: str = ""  # "3 M parameters"
    control: Control | None = None
    parts: tuple[tuple[str, Verdict], ...] = ()  # of a claim about several comparisons, by name
    absent: bool = False  # an effect of the margin's size, either way, is shown not to be there

    @property
    def weak(self) -> bool:
        """Undecided by too few seeds: an effect of the margin's size would be missed."""
        undecided = self.outcome is Outcome.INCONCLUSIVE and not self.absent
        return undecided and self.mde is not None and bool(self.margin) and self.mde > (self.margin or 0.0)

    def __str__(self) -> str:
        at = f" at {self.scale}" if self.scale and self.outcome is not Outcome.OUT_OF_REACH else ""
        return f"{self.outcome}{at}: {self.reason}"


# -------------------------------------------------------------------------------- kinds of claims


def no_worse(found: Data, margin: float) -> Verdict:
    """Ours is higher (a loss: worse) than the baseline by less than margin, if at all."""
    return _null(found, margin, two_sided=False)


def equivalent(found: Data, margin: float) -> Verdict:
    """Ours differs from the baseline by less than margin, in either direction. Two sides can contradict it, so that
    takes half as large a p on either."""
    return _null(found, margin, two_sided=True)


def higher(found: Data, margin: float = 0.0, *, absence_contradicts: bool = False) -> Verdict:
    """Ours is higher than the baseline by more than margin. The other direction contradicts; so does an effect shown to
    be smaller than margin, where the claim is about one of that size."""
    return _direction(found, margin, 1, absence_contradicts)


def lower(found: Data, margin: float = 0.0, *, absence_contradicts: bool = False) -> Verdict:
    """Ours is lower than the baseline by more than margin; as `higher`."""
    return _direction(found, margin, -1, absence_contradicts)


def ordering(neighbours: Mapping[str, Data], margin: float = 0.0) -> Verdict:
    """a > b > c: of each two neighbours, by name, the differences first minus second; all must be above margin."""
    return every({name: higher(found, margin) for name, found in neighbours.items()})


def share_within(shares: Data, low: float, high: float) -> Verdict:
    """A share, one of each seed, lies between two bounds: reproduced where its interval does, contradicted where the
    interval lies outside. (Differences from 0, that is; tensors of one trial are not independent, seeds are.)"""
    if not low < high:
        raise ValueError(f"a share between {low} and {high}: the first must be the smaller")
    if isinstance(shares, Differences):  # a trial that diverged has no share
        shares = replace(shares, diverged=0, baseline_diverged=0)
    if (early := _too_little(shares)) is not None:
        return early
    assert isinstance(shares, Differences)
    inside = [_p(shares, low, Side.ABOVE), _p(shares, high, Side.BELOW)]
    outside = [_p(shares, low, Side.BELOW), _p(shares, high, Side.ABOVE)]
    p_for, p_against = max(inside), min(1.0, 2 * min(outside))
    s = _summary(shares)
    words = f"the share is {s.mean:.2%}, and said to be {low:.2%} to {high:.2%}"
    return _verdict(shares, p_for, p_against, words, margin=(high - low) / 2)


def exact(holds: bool, what: str, trials: Iterable[str] = ()) -> Verdict:
    """Of a claim that arithmetic or code decides, at any scale."""
    outcome = Outcome.REPRODUCED if holds else Outcome.CONTRADICTED
    return Verdict(outcome, what, trials=tuple(trials))


def every(parts: Mapping[str, Verdict]) -> Verdict:
    """A claim about several comparisons: reproduced where each is (the worst p is its p), contradicted where one is,
    its p against corrected for their number."""
    if not parts:
        raise ValueError("a claim about no comparison at all")
    found = list(parts.values())
    against = [v.p_against for v in found if v.p_against is not None]
    p_against = min(1.0, len(against) * min(against)) if against else None
    tested_for = [v.p_for for v in found if v.p_for is not None]
    wrong = [name for name, v in parts.items() if v.outcome is Outcome.CONTRADICTED]
    sure = any(v.outcome is Outcome.CONTRADICTED and v.p_against is None for v in found)  # by arithmetic
    if wrong and (sure or (p_against is not None and p_against < ALPHA)):
        outcome, names = Outcome.CONTRADICTED, wrong
    elif all(v.outcome is Outcome.REPRODUCED for v in found):
        outcome, names = Outcome.REPRODUCED, []
    elif all(v.outcome is Outcome.OUT_OF_REACH for v in found):
        outcome, names = Outcome.OUT_OF_REACH, [*parts][:1]
    else:
        outcome = Outcome.INCONCLUSIVE
        names = [name for name, v in parts.items() if v.outcome is not Outcome.REPRODUCED]
    alike = len({v.margin for v in found}) == 1
    reasons = "; ".join(f"{name}: {parts[name].reason}" for name in names) or f"all of {', '.join(parts)}"
    return Verdict(
        outcome,
        reasons,
        n=min(v.n for v in found),
        mde=max((v.mde for v in found if v.mde is not None), default=None) if alike else None,
        margin=found[0].margin if alike else None,
        relative=found[0].relative,
        p_for=max(tested_for, default=None),
        p_against=p_against,
        trials=tuple(dict.fromkeys(t for v in found for t in v.trials)),
        notes=tuple(dict.fromkeys(note for v in found for note in v.notes)),
        parts=tuple(parts.items()),
    )


def out_of_reach(reason: str) -> Verdict:
    return Verdict(Outcome.OUT_OF_REACH, reason)


def not_run(scale: str) -> Verdict:
    return Verdict(Outcome.OUT_OF_REACH, f"not run at this scale ({scale})")


def noted(verdict: Verdict, *notes: str) -> Verdict:
    """With more to be said of it."""
    return replace(verdict, notes=(*notes, *verdict.notes))


# -------------------------------------------------------------------------------- what a design can tell


def detectable(found: Differences) -> float | None:
    """The smallest true difference that one side of a test finds four times of five; None of fewer than two pairs."""
    if not found.values:
        return None
    s = _summary(found)
    return minimum_detectable_effect(s.sd, s.n, sides=1, df=s.spread.df) if s.spread else None


def seeds_needed(found: Differences, margin: float) -> int | None:
    """For a difference of the margin to be found so often; None where more than SEEDS. Of two pairs or more."""
    s = _summary(found)
    assert s.spread is not None
    return required_n(s.spread.sd, margin, sides=1, most=SEEDS, each=s.spread.df / (s.n - 1))


# -------------------------------------------------------------------------------- what may undo one


def controlled(verdict: Verdict, control: Control) -> Verdict:
    """Decided only if the runs show that they would have found an effect."""
    if control.passed or verdict.outcome not in (Outcome.REPRODUCED, Outcome.CONTRADICTED):
        return replace(verdict, control=control)
    failed = "failed" if control.tested else "was not tested"
    reason = f"its control {failed} ({control.name}: {control.detail}); without it: {verdict.outcome}, {verdict.reason}"
    return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason, control=control)


def corrected(verdicts: Mapping[str, Verdict], alpha: float = ALPHA) -> dict[str, Verdict]:
    """Holm over all claims of a report that were tested: each keeps its decision, or is inconclusive for that reason.
    Claims that were not decided count too, else those that happen to succeed would choose the family."""
    found = dict(verdicts)
    for outcome, which in ((Outcome.REPRODUCED, "p_for"), (Outcome.CONTRADICTED, "p_against")):
        family = {name: p for name, v in verdicts.items() if (p := getattr(v, which)) is not None}
        for name, p in zip(family, holm(list(family.values())), strict=True):
            if verdicts[name].outcome is outcome and p > alpha:
                reason = (
                    f"alone {outcome} (p {family[name]:.2g}), but not among {len(family)} claims tested together "
                    f"(Holm: p {p:.2g}); {verdicts[name].reason}"
                )
                found[name] = replace(verdicts[name], outcome=Outcome.INCONCLUSIVE, reason=reason)
    return found


# -------------------------------------------------------------------------------- details


def _null(found: Data, margin: float, *, two_sided: bool) -> Verdict:
    if not margin > 0:
        raise ValueError(f"margin {margin}: a positive number is expected, what counts as no difference")
    if (early := _too_little(found, margin)) is not None:
        return early
    assert isinstance(found, Differences)
    if (event := _divergence(found, margin, -1, no_difference=two_sided)) is not None:
        return event
    above, p_for = _p(found, margin, Side.ABOVE), _p(found, margin, Side.BELOW)
    p_against, what = above, f"a margin of {found.shown(margin)}"
    if two_sided:
        p_for = max(p_for, _p(found, -margin, Side.ABOVE))
        p_against = min(1.0, 2 * min(above, _p(found, -margin, Side.BELOW)))
        what = what.replace("+", "±")
    s = _summary(found)
    verdict = _verdict(found, p_for, p_against, f"{found.shown(s.mean)} beside {what}", margin)
    if verdict.outcome is Outcome.CONTRADICTED or verdict.mde is None or verdict.mde <= margin:
        return verdict
    needed = seeds_needed(found, margin)
    reason = (
        f"underpowered: {s.n} seeds find a difference of {found.shown(verdict.mde)}, above the margin of "
        f"{found.shown(margin)}; {f'about {needed}' if needed else f'more than {SEEDS}'} would do"
    )
    return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason)


def _direction(found: Data, margin: float, sign: int, absence_contradicts: bool) -> Verdict:
    if not margin >= 0:
        raise ValueError(f"margin {margin}: 0 or more is expected, the smallest effect that counts")
    if (early := _too_little(found, margin)) is not None:
        return early
    assert isinstance(found, Differences)
    if (event := _divergence(found, margin, sign)) is not None:
        return event
    towards, away = (Side.ABOVE, Side.BELOW) if sign > 0 else (Side.BELOW, Side.ABOVE)
    p_for = _p(found, sign * margin, towards)
    p_against = _p(found, sign * margin if absence_contradicts else 0.0, away)
    s = _summary(found)
    said = "higher" if sign > 0 else "lower"
    words = f"{found.shown(s.mean)}, and said to be {said}" + (f" by {found.shown(margin)[1:]}" if margin else "")
    verdict = _verdict(found, p_for, p_against, words, margin)
    absent = margin > 0 and max(_p(found, -margin, Side.ABOVE), _p(found, margin, Side.BELOW)) < ALPHA
    if verdict.outcome is Outcome.INCONCLUSIVE and absent:
        return replace(verdict, reason=f"{words}: shown to be smaller than the margin", absent=True)
    return verdict


def _verdict(found: Differences, p_for: float, p_against: float, words: str, margin: float | None) -> Verdict:
    s = _summary(found)
    if p_against < ALPHA:
        outcome = Outcome.CONTRADICTED
    else:
        outcome = Outcome.REPRODUCED if p_for < ALPHA else Outcome.INCONCLUSIVE
    return Verdict(
        outcome,
        words if outcome is not Outcome.INCONCLUSIVE else f"{words}: the interval holds both",
        effect=s.mean,
        interval=s.interval,
        n=s.n,
        mde=detectable(found),
        margin=margin,
        relative=found.relative,
        p_for=p_for,
        p_against=p_against,
        trials=found.trials,
        notes=found.notes,
    )


def _summary(found: Differences) -> Summary:
    return summary(found.values, 1 - 2 * ALPHA, found.spread)


def _p(found: Differences, against: float, side: Side) -> float:
    """Of two pairs or more."""
    p = t_test(found.values, against, side, found.spread)
    assert p is not None
    return p


def _too_little(found: Data, margin: float | None = None) -> Verdict | None:
    """Where there is nothing to test."""
    if isinstance(found, NoData):
        return Verdict(Outcome.INCONCLUSIVE, f"no data: {found.reason}", margin=margin, trials=found.trials)
    if found.pairs >= 2:
        return None
    effect = found.values[0] if found.values else None
    reason = "no data: no pair is complete" if not found.pairs else "one seed: no interval, so nothing is decided"
    if effect is not None:
        reason += f" ({found.shown(effect)})"
    return Verdict(
        Outcome.INCONCLUSIVE,
        reason,
        effect=effect,
        n=found.pairs,
        margin=margin,
        relative=found.relative,
        trials=found.trials,
        notes=found.notes,
    )


def _divergence(found: Differences, margin: float, sign: int, *, no_difference: bool = False) -> Verdict | None:
    """Where pairs diverged there is no mean: decided by how often each arm did. sign: +1, the claim is that ours is
    higher; -1, that it is lower, or no higher."""
    ours, theirs, pairs = found.diverged, found.baseline_diverged, found.pairs
    if not ours and not theirs:
        return None
    more, fewer = more_events(ours, pairs, theirs, pairs), more_events(theirs, pairs, ours, pairs)
    if no_difference:
        p_for, p_against = 1.0, min(1.0, 2 * min(more, fewer))
    else:
        p_for, p_against = (more, fewer) if sign > 0 else (fewer, more)
    outcome = Outcome.INCONCLUSIVE
    if p_against <= ALPHA:  # three of three beside none of three is 0.05 exactly
        outcome = Outcome.CONTRADICTED
    elif p_for <= ALPHA:
        outcome = Outcome.REPRODUCED
    reason = f"of {pairs} pairs, ours diverged in {ours} and the baseline in {theirs} (Fisher's exact test)"
    return Verdict(
        outcome,
        reason,
        n=pairs,
        margin=margin,
        relative=found.relative,
        p_for=p_for,
        p_against=p_against,
        trials=found.trials,
        notes=found.notes,
    )
