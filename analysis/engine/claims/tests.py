"""Statistical tests of one comparison: from its data to a Finding. All functions are pure and serve all studies.

The tests, with the margin m of the comparison:

* `higher`, `lower` (m may be 0): SUPPORTED if the effect is significantly greater than m in the stated direction,
  OPPOSED if it significantly has the opposite sign, ABSENT if it is significantly smaller than m.
* `no_worse`, `equivalent` (m > 0): SUPPORTED if the effect (for `equivalent`, its size) is significantly smaller than m
  and the minimum detectable effect is at most m; OPPOSED if it is significantly greater than m. These tests never give
  ABSENT.
* `within`, `above`, `below`: compare the arm's own numbers with one or two bounds. Shares are tested as arcsin √share.
* `more`, `fewer`: an exact test, stratified for example by learning rate, of how often an event occurs in each arm.
* `all_above`, `all_below`: check that each trial's number is beyond the bound, without a p value.

p values are compared with ALPHA. All are one-sided; for a statement with two sides, p is the greater of the two sides'
p values if both sides have to hold, and twice the smaller one if one side suffices. A pair in which a trial diverged
has no difference. If there are such pairs, the exact test of how often each arm diverged replaces the test of losses.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fewbits.analysis.engine.claims.findings import Finding, Status
from fewbits.analysis.engine.claims.schema import BOUNDED, DIRECTIONS, EVENTS, OBSERVED, Comparison
from fewbits.analysis.engine.results.data import Differences, Events, Exact, Measured, NoData, NotPlanned
from fewbits.analysis.engine.statistics.estimates import ALPHA, Estimate, Interval, Side, Spread, estimate
from fewbits.analysis.engine.statistics.multiplicity import Stratum, compare_events
from fewbits.analysis.engine.statistics.power import MOST_SEEDS, detectable, seeds_needed

LEVEL = 1 - 2 * ALPHA
INACTIVE = "both arms have exactly the same numbers in every pair: the mechanism was not active"


def judge(comparison: Comparison, data: Measured) -> Finding:
    """Test a comparison with its data and return the finding.

    If the data are NotPlanned or NoData, nothing is tested, and the finding has the reason for the missing data.
    """
    empty = Finding(
        comparison.name,
        Status.UNDECIDED,
        "",
        comparison.test,
        margin=comparison.margin.value if comparison.margin else None,
        bound=comparison.part.bounds,
        absence=comparison.absence,
        alone=comparison.part.alone,
        title=comparison.title,
    )
    if comparison.part.out_of_reach:
        return replace(empty, status=Status.OUT_OF_REACH, reason=comparison.part.out_of_reach, margin=None)
    if isinstance(data, NotPlanned):
        return replace(empty, status=Status.NOT_RUN, reason=data.reason)
    if isinstance(data, NoData):
        return replace(empty, reason=f"no data: {data.reason}", trials=data.trials)
    empty = replace(empty, trials=data.trials, notes=data.notes)
    if isinstance(data, Events):
        if comparison.test not in EVENTS:
            raise ValueError(
                f"{comparison.name}: test {comparison.test!r} cannot be used for counts of events such as divergence; "
                f"valid tests are {', '.join(EVENTS)}"
            )
        return _events(empty, data.strata, comparison.test == "more")
    return _numbers(replace(empty, relative=data.relative, n=data.pairs, unit=data.unit), comparison, data)


def judge_exact(name: str, data: Exact) -> Finding:
    """Return the finding of an exact check: SUPPORTED if the check holds, else OPPOSED; it has no p value."""
    status = Status.SUPPORTED if data.holds else Status.OPPOSED
    return Finding(name, status, data.detail, "exact", notes=data.notes)


# -------------------------------------------------------------------------------- numbers


def _numbers(empty: Finding, comparison: Comparison, data: Differences) -> Finding:
    test = comparison.test
    paired = test in DIRECTIONS or test in BOUNDED
    if not paired:
        data = replace(data, diverged=0, baseline_diverged=0)  # only tests of differences count divergence
        empty = replace(empty, n=data.pairs)
    if test in OBSERVED:
        return _observed(empty, comparison, data)
    if data.pairs < 2:
        effect = data.values[0] if data.values else None
        shown = "" if effect is None else data.shown(effect) if paired else f"{effect:.4g}"
        reason = f"one seed ({shown}) gives no interval" if shown else "no data: no pair has two finished trials"
        return replace(empty, effect=effect, reason=reason)
    if data.diverged or data.baseline_diverged:
        strata = (Stratum("", data.diverged, data.pairs, data.baseline_diverged, data.pairs),)
        return _events(empty, strata, test == "higher", equally_often=test == "equivalent", diverged=True)
    if paired and not any(data.values):
        return replace(empty, effect=0.0, reason=INACTIVE)
    estimated = estimate(_transformed(data), data.spread, data.shared)
    own = estimate(_transformed(data), None, data.shared)
    assert estimated is not None
    assert own is not None
    empty = replace(empty, effect=sum(data.values) / len(data.values), interval=_interval(estimated, data))
    if paired or not _shares(data):
        empty = replace(empty, mde=detectable(estimated))
    if not estimated.error:
        empty = replace(empty, least_p=0.5**estimated.n)
    if test in DIRECTIONS:
        return _direction(empty, data, estimated, own, 1 if test == "higher" else -1)
    if test in BOUNDED:
        return _null(empty, data, estimated, own, two_sided=test == "equivalent")
    return _bounds(empty, comparison, data, estimated)


def _direction(empty: Finding, data: Differences, estimated: Estimate, own: Estimate, sign: int) -> Finding:
    margin = empty.margin or 0.0
    towards, away = (Side.ABOVE, Side.BELOW) if sign > 0 else (Side.BELOW, Side.ABOVE)
    p_for, p_against = estimated.p(sign * margin, towards), estimated.p(0.0, away)
    p_absent = estimated.p(sign * margin, away) if margin else None
    stated = f"stated to be {'higher' if sign > 0 else 'lower'}" + (f" by {data.shown(margin)[1:]}" if margin else "")
    assert empty.effect is not None
    start = f"{data.shown(empty.effect)}, {stated}"
    if p_for <= ALPHA:
        status, reason = Status.SUPPORTED, start
    elif p_against <= ALPHA:
        status, reason = Status.OPPOSED, f"{start}: significant, but with the opposite sign"
    elif p_absent is not None and p_absent <= ALPHA:
        status, reason = Status.ABSENT, f"{start}: the effect is significantly smaller than this margin"
    else:
        status, reason = Status.UNDECIDED, f"{start}: the interval includes values for and against the statement"
    p_own = None if estimated.own else own.p(sign * margin, towards)
    return replace(
        empty, status=status, reason=reason, p_for=p_for, p_against=p_against, p_absent=p_absent, p_own=p_own
    )


def _null(empty: Finding, data: Differences, estimated: Estimate, own: Estimate, *, two_sided: bool) -> Finding:
    margin = empty.margin
    assert margin is not None
    assert empty.effect is not None

    def smaller(estimate: Estimate) -> float:
        upper = estimate.p(margin, Side.BELOW)
        return max(upper, estimate.p(-margin, Side.ABOVE)) if two_sided else upper

    p_for, p_against = smaller(estimated), estimated.p(margin, Side.ABOVE)
    if two_sided:
        p_against = min(1.0, 2 * min(p_against, estimated.p(-margin, Side.BELOW)))
    bound = data.shown(margin).replace("+", "±") if two_sided else data.shown(margin)
    reason = f"{data.shown(empty.effect)}, with a margin of {bound}"
    status = Status.UNDECIDED
    if p_against <= ALPHA:
        status = Status.OPPOSED
    elif empty.mde is not None and empty.mde > margin:
        needed = seeds_needed(estimated, margin)
        enough = f"about {needed}" if needed else f"more than {MOST_SEEDS}"
        reason = (
            f"underpowered: {estimated.n} seeds detect a difference of {data.shown(empty.mde)[1:]} or more, which "
            f"exceeds the margin of {data.shown(margin)[1:]}; {enough} seeds would detect a difference of the margin's "
            f"size (measured: {data.shown(empty.effect)})"
        )
    elif p_for <= ALPHA:
        status = Status.SUPPORTED
    else:
        reason += ": the interval includes differences smaller and greater than the margin"
    p_own = None if estimated.own else smaller(own)
    return replace(empty, status=status, reason=reason, p_for=p_for, p_against=p_against, p_own=p_own)


def _bounds(empty: Finding, comparison: Comparison, data: Differences, estimated: Estimate) -> Finding:
    part, test = comparison.part, comparison.test
    low = part.low if test == "within" else part.than if test == "above" else None
    high = part.high if test == "within" else part.than if test == "below" else None
    inside, outside = [], []
    for bound, inner, outer in ((low, Side.ABOVE, Side.BELOW), (high, Side.BELOW, Side.ABOVE)):
        if bound is not None:
            against = _arcsine(bound) if _shares(data) else bound
            inside.append(estimated.p(against, inner))
            outside.append(estimated.p(against, outer))
    p_for, p_against = max(inside), min(1.0, len(outside) * min(outside))

    def shown(value: float) -> str:
        return f"{value:.2%}" if _shares(data) else f"{value:.4g}"

    if low is not None and high is not None:
        stated = f"{shown(low)} to {shown(high)}"
    else:
        stated = f"above {shown(low)}" if low is not None else f"below {shown(high or 0.0)}"
    assert empty.effect is not None
    reason = f"{shown(empty.effect)}, stated to be {stated}"
    status = Status.SUPPORTED if p_for <= ALPHA else Status.OPPOSED if p_against <= ALPHA else Status.UNDECIDED
    if status is Status.UNDECIDED:
        equal = "" if estimated.error else f" ({estimated.n} equal values: p is at least {empty.least_p:.3g})"
        reason += f": the interval includes values for and against the statement{equal}"
    return replace(empty, status=status, reason=reason, p_for=p_for, p_against=p_against)


def _observed(empty: Finding, comparison: Comparison, data: Differences) -> Finding:
    """Return the finding of the test `all_above` or `all_below`.

    It is SUPPORTED if the number of each trial is beyond the bound, else OPPOSED; without any number, it is UNDECIDED.
    There is no p value: the result holds for these trials, not for other seeds. empty: the finding to complete; it has
    everything but the result.
    """
    than = comparison.part.than
    assert than is not None
    if not data.values:
        return replace(empty, reason="no data: no trial has this metric")
    beyond = [value > than if comparison.test == "all_above" else value < than for value in data.values]
    side = "above" if comparison.test == "all_above" else "below"
    ends = f"{min(data.values):.4g} to {max(data.values):.4g}"
    return replace(
        empty,
        status=Status.SUPPORTED if all(beyond) else Status.OPPOSED,
        reason=f"{ends} in {len(beyond)} trial{'s' * (len(beyond) != 1)}; {side} {than:g} is expected",
        effect=sum(data.values) / len(data.values),
    )


def _transformed(data: Differences) -> list[float]:
    """Return the values to test: those of `data` or, if these are shares (limits 0 and 1), arcsin √share of each.

    After this transformation, the spread of shares hardly depends on their size.
    """
    return [_arcsine(value) for value in data.values] if _shares(data) else list(data.values)


def _arcsine(value: float) -> float:
    return math.asin(math.sqrt(min(1.0, max(0.0, value))))


def _shares(data: Differences) -> bool:
    return data.bounds == (0.0, 1.0)


def _interval(estimated: Estimate, data: Differences) -> Interval:
    interval = estimated.interval(LEVEL)
    if _shares(data):
        low, high = (math.sin(min(math.pi / 2, max(0.0, end))) ** 2 for end in (interval.low, interval.high))
        return Interval(low, high, LEVEL)
    if data.bounds is None:
        return interval
    low, high = data.bounds
    return Interval(max(low, interval.low), min(high, interval.high), LEVEL)


# -------------------------------------------------------------------------------- events


def _events(
    empty: Finding, strata: tuple[Stratum, ...], more: bool, *, equally_often: bool = False, diverged: bool = False
) -> Finding:
    our_events = sum(stratum.our_events for stratum in strata)
    our_trials = sum(stratum.our_trials for stratum in strata)
    baseline_events = sum(stratum.baseline_events for stratum in strata)
    baseline_trials = sum(stratum.baseline_trials for stratum in strata)
    if not our_trials or not baseline_trials:
        return replace(empty, reason="no data: an arm has no finished trial")
    test = compare_events(strata)
    p_for, p_against = (test.more, test.fewer) if more else (test.fewer, test.more)
    least = test.least_more if more else test.least_fewer
    if equally_often:
        p_for, p_against, least = 1.0, min(1.0, 2 * min(test.more, test.fewer)), 1.0
    status = Status.SUPPORTED if p_for <= ALPHA else Status.OPPOSED if p_against <= ALPHA else Status.UNDECIDED
    # equally_often: the claim states that both arms have the event equally often. This test can only contradict that.
    what = "diverged in" if diverged else "the event occurred in"
    reason = (
        f"{what} {our_events} of {our_trials} trials of ours and {baseline_events} of {baseline_trials} of the "
        "baseline (exact test)"
    )
    if status is Status.UNDECIDED and least > ALPHA:
        reason += f"; so few events cannot be significant (p is at least {least:.2g})"
    return replace(
        empty,
        status=status,
        reason=reason,
        n=our_trials,
        unit="trial",
        effect=our_events / our_trials - baseline_events / baseline_trials if not diverged else None,
        relative=False if not diverged else empty.relative,
        p_for=p_for,
        p_against=p_against,
        least_p=least,
    )


def spread_of(data: Differences) -> Spread | None:
    """Return the spread (standard deviation) that a test of these data uses; None for fewer than two values.

    It is the spread of the values or, if that is larger, the pooled spread `data.spread` times the factor CAUTION,
    which is greater than 1 (`estimate` explains why).
    """
    estimated = estimate(_transformed(data), data.spread, data.shared) if data.values else None
    return None if estimated is None else estimated.spread
