"""Statistical tests of one comparison: from its data to a Finding. All functions are pure and serve all studies.

The tests, with the margin m of the comparison:

* `higher`, `lower`: SUPPORTED if the effect significantly has the stated sign. OPPOSED if it significantly has the
  opposite sign or, with a margin, if it is shown to be smaller than m.
* `equal`, `no_worse`: SUPPORTED if the effect (for `equal`, its size) is shown to be smaller than m, by two (one)
  one-sided tests; OPPOSED if it is shown to be greater than m.
* `within`: SUPPORTED if the number is shown to be inside of the bounds, OPPOSED if it is shown to be outside.
* `more`, `fewer`: Fisher's exact test of how often an event such as divergence occurs in each arm.

p values are those of paired, one-sided t tests and are compared with ALPHA; they are corrected for their number later
(verdicts.py). A pair in which a trial diverged has no difference; if there are such pairs, Fisher's test of how often
each arm diverged replaces the test of losses. With one seed, the error is that of A/A comparisons and of the choice of
documents. A single run's number that is no loss, for example a share of tensors, has no error: it is only compared.
"""

from __future__ import annotations

from dataclasses import replace

from fewbits.analysis.engine.claims.findings import Finding, Status
from fewbits.analysis.engine.claims.schema import BOUNDED, DIRECTIONS, EVENTS, WITHIN, Comparison
from fewbits.analysis.engine.results.data import CannotFail, Differences, Events, Exact, Measured, NoData, NotPlanned
from fewbits.analysis.engine.statistics import (
    ALPHA,
    Estimate,
    Interval,
    Side,
    estimate,
    extra_interval,
    extra_tokens,
    fisher,
)

LEVEL = 1 - 2 * ALPHA
INACTIVE = "both arms have exactly the same numbers in every pair: the mechanism was not active"
ONE_SEED = "one seed: the error is that of A/A comparisons and of the choice of documents, not of seeds"
ONE_RUN = "one run: compared without an error"


def judge(comparison: Comparison, data: Measured, margin: float | None = None, *, one_run: bool = False) -> Finding:
    """Test a comparison with its data and return the finding; for missing data, the finding has the reason.

    margin: in the units of the data. one_run: a single run may decide comparisons of numbers without an error.
    """
    empty = Finding(
        comparison.name,
        Status.UNDECIDED,
        "",
        comparison.test,
        margin=margin,
        bound=comparison.part.shown_bounds,
        title=comparison.title,
    )
    if isinstance(data, NotPlanned):
        return replace(empty, status=Status.NOT_RUN, reason=data.reason)
    if isinstance(data, CannotFail):
        return replace(empty, status=Status.VACUOUS, reason=data.reason, trials=data.trials)
    if isinstance(data, NoData):
        return replace(empty, reason=f"no data: {data.reason}", trials=data.trials)
    empty = replace(empty, trials=data.trials, notes=data.notes)
    if isinstance(data, Events) != (comparison.test in EVENTS):
        raise ValueError(
            f"{comparison.name}: the tests {' and '.join(EVENTS)} are for counts of events such as divergence, and "
            f"only for these; the test is {comparison.test}"
        )
    if isinstance(data, Events):
        return _events(empty, data, comparison.test, one_run)
    return _numbers(replace(empty, relative=data.relative, n=data.pairs, unit=data.unit), comparison, data, one_run)


def judge_exact(name: str, data: Exact) -> Finding:
    """Return the finding of an exact check: SUPPORTED if the check holds, else OPPOSED; it has no p value."""
    status = Status.SUPPORTED if data.holds else Status.OPPOSED
    return Finding(name, status, data.detail, "exact", notes=data.notes)


def _numbers(empty: Finding, comparison: Comparison, data: Differences, one_run: bool) -> Finding:
    test = comparison.test
    if test == WITHIN:  # only tests of differences count divergence
        data = replace(data, diverged=0, baseline_diverged=0)
        empty = replace(empty, n=data.pairs)
    if data.diverged or data.baseline_diverged:
        counts = Events(data.diverged, data.pairs, data.baseline_diverged, data.pairs)
        return _events(empty, counts, {"higher": "more", "equal": "equal"}.get(test, "fewer"), one_run)
    if not data.values:
        return replace(empty, reason="no data: no pair has two finished trials")
    if test != WITHIN and not any(data.values):
        return replace(empty, effect=0.0, reason=INACTIVE)
    empty = replace(empty, effect=sum(data.values) / len(data.values))
    estimated = estimate(data.values, data.shared, data.noise)
    if estimated is None and one_run and data.observed:
        estimated, empty = Estimate(1, data.values[0], 0.0, 1.0), replace(empty, notes=(*empty.notes, ONE_RUN))
    elif estimated is None:
        shown = data.shown(data.values[0]) if test != WITHIN else f"{data.values[0]:.4g}"
        return replace(empty, reason=f"one {data.unit} ({shown}) gives no interval")
    else:
        empty = replace(empty, interval=_interval(estimated, data))
        if len(data.values) == 1:
            empty = replace(empty, notes=(*empty.notes, ONE_SEED))
    if data.slope and data.relative and empty.interval:
        assert empty.effect is not None
        tokens, ends = extra_tokens(empty.effect, data.slope), extra_interval(empty.interval, data.slope)
        empty = replace(empty, extra_tokens=tokens, extra_interval=ends)
    if test in DIRECTIONS:
        found = _direction(empty, data, estimated, 1 if test == "higher" else -1)
    elif test in BOUNDED:
        found = _bounded(empty, data, estimated, two_sided=test == "equal")
    else:
        found = _within(empty, comparison, estimated)
    return replace(found, p_for=None, p_against=None) if ONE_RUN in found.notes else found


def _direction(empty: Finding, data: Differences, estimated: Estimate, sign: int) -> Finding:
    towards, away = (Side.ABOVE, Side.BELOW) if sign > 0 else (Side.BELOW, Side.ABOVE)
    p_for, p_against = estimated.p(0.0, towards), estimated.p(0.0, away)
    stated = f"stated to be {'higher' if sign > 0 else 'lower'}"
    start = f"{data.shown(estimated.mean)}, {stated}"
    status, reason = Status.UNDECIDED, f"{start}: the interval includes values of both signs"
    if p_for <= ALPHA:
        status, reason = Status.SUPPORTED, start
    elif p_against <= ALPHA:
        status, reason = Status.OPPOSED, f"{start}: it has the opposite sign"
    elif empty.margin is not None:
        p_against = min(p_against, estimated.p(sign * empty.margin, away))
        if p_against <= ALPHA:
            status = Status.OPPOSED
            reason = f"{start}: the effect is smaller than the margin of {data.shown(empty.margin)[1:]}"
    return replace(empty, status=status, reason=reason, p_for=p_for, p_against=p_against)


def _bounded(empty: Finding, data: Differences, estimated: Estimate, *, two_sided: bool) -> Finding:
    margin = empty.margin
    if margin is None:
        return replace(empty, reason=f"{data.shown(estimated.mean)}: the margin is not known")
    p_for, p_against = estimated.p(margin, Side.BELOW), estimated.p(margin, Side.ABOVE)
    if two_sided:
        p_for = max(p_for, estimated.p(-margin, Side.ABOVE))
        p_against = min(1.0, 2 * min(p_against, estimated.p(-margin, Side.BELOW)))
    bound = data.shown(margin).replace("+", "±") if two_sided else data.shown(margin)
    reason = f"{data.shown(estimated.mean)}, with a margin of {bound}"
    status = Status.SUPPORTED if p_for <= ALPHA else Status.OPPOSED if p_against <= ALPHA else Status.UNDECIDED
    if status is Status.UNDECIDED:
        reason += ": the interval includes differences smaller and greater than the margin"
    return replace(empty, status=status, reason=reason, p_for=p_for, p_against=p_against)


def _within(empty: Finding, comparison: Comparison, estimated: Estimate) -> Finding:
    low, high = comparison.part.bounds or (None, None)
    inside, outside = [], []
    for bound, inner, outer in ((low, Side.ABOVE, Side.BELOW), (high, Side.BELOW, Side.ABOVE)):
        if bound is not None:
            inside.append(estimated.p(bound, inner))
            outside.append(estimated.p(bound, outer))
    p_for, p_against = max(inside), min(1.0, len(outside) * min(outside))
    reason = f"{estimated.mean:.4g}, stated to be {empty.bound}"
    status = Status.SUPPORTED if p_for <= ALPHA else Status.OPPOSED if p_against <= ALPHA else Status.UNDECIDED
    if status is Status.UNDECIDED:
        reason += ": the interval includes values for and against the statement"
    return replace(empty, status=status, reason=reason, p_for=p_for, p_against=p_against)


def _interval(estimated: Estimate, data: Differences) -> Interval:
    interval, (low, high) = estimated.interval(LEVEL), data.bounds or (-float("inf"), float("inf"))
    return Interval(max(low, interval.low), min(high, interval.high), LEVEL)


def _events(empty: Finding, counts: Events, test: str, one_run: bool) -> Finding:
    """Return the finding of a test of events. test: `more`, `fewer` or `equal`, which events can only oppose."""
    if not counts.of or not counts.baseline_of:
        return replace(empty, reason="no data: an arm has no finished trial")
    more, fewer = fisher(counts.events, counts.of, counts.baseline_events, counts.baseline_of)
    p_for, p_against = (more, fewer) if test == "more" else (fewer, more)
    if test == "equal":
        p_for, p_against = 1.0, min(1.0, 2 * min(more, fewer))
    status = Status.SUPPORTED if p_for <= ALPHA else Status.OPPOSED if p_against <= ALPHA else Status.UNDECIDED
    what = "diverged in" if empty.n else "the event occurred in"
    reason = (
        f"{what} {counts.events} of {counts.of} trials of ours and {counts.baseline_events} of {counts.baseline_of} "
        "of the baseline"
    )
    empty = replace(empty, n=counts.of, unit="trial", effect=None)
    if one_run and counts.of == counts.baseline_of == 1 and counts.events != counts.baseline_events:
        status = Status.SUPPORTED if test == ("more" if counts.events else "fewer") else Status.OPPOSED
        return replace(empty, status=status, reason=reason, notes=(*empty.notes, ONE_RUN))
    return replace(empty, status=status, reason=reason, p_for=p_for, p_against=p_against)
