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
    """Test a comparison with its data and return the finding; for missing data, the finding has the reason."""
    test, bound = comparison.test, comparison.part.shown_bounds
    empty = Finding(comparison.name, Status.UNDECIDED, "", test, margin=margin, bound=bound, title=comparison.title)
    empty = replace(empty, relative=bool(comparison.baseline) and comparison.part.relative)
    if isinstance(data, NotPlanned):
        return replace(empty, status=Status.NOT_RUN, reason=data.reason)
    empty = replace(empty, trials=data.trials)
    if isinstance(data, CannotFail):
        return replace(empty, status=Status.VACUOUS, reason=data.reason)
    if isinstance(data, NoData):
        return replace(empty, reason=f"no data: {data.reason}")
    if isinstance(data, Events) != (test in EVENTS):
        raise ValueError(
            f"{comparison.name}: the tests {' and '.join(EVENTS)} are for counts of events such as divergence, and "
            f"only for these; the test is {test}"
        )
    empty = replace(empty, notes=data.notes)
    if isinstance(data, Events):
        return _events(empty, data, test, one_run)
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
    reason = f"{data.shown(estimated.mean)}, stated to be {'higher' if sign > 0 else 'lower'}"
    opposed, undecided = ": it has the opposite sign", ": the interval includes values of both signs"
    if p_for > ALPHA and p_against > ALPHA and empty.margin is not None:
        p_against = min(p_against, estimated.p(sign * empty.margin, away))
        opposed = f": the effect is smaller than the margin of {data.shown(empty.margin)[1:]}"
    return _decided(empty, p_for, p_against, reason, opposed, undecided)


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
    undecided = ": the interval includes differences smaller and greater than the margin"
    return _decided(empty, p_for, p_against, reason, "", undecided)


def _within(empty: Finding, comparison: Comparison, estimated: Estimate) -> Finding:
    low, high = comparison.part.bounds or (None, None)
    sides = ((low, Side.ABOVE, Side.BELOW), (high, Side.BELOW, Side.ABOVE))
    inside = [estimated.p(bound, inner) for bound, inner, _ in sides if bound is not None]
    outside = [estimated.p(bound, outer) for bound, _, outer in sides if bound is not None]
    reason = f"{estimated.mean:.4g}, stated to be {empty.bound}"
    undecided = ": the interval includes values for and against the statement"
    return _decided(empty, max(inside), min(1.0, len(outside) * min(outside)), reason, "", undecided)


def _decided(
    empty: Finding, p_for: float, p_against: float, reason: str, opposed: str = "", undecided: str = ""
) -> Finding:
    """Return the finding with the status that its p values give; opposed, undecided: what the reason then adds."""
    if p_for <= ALPHA:
        status, more = Status.SUPPORTED, ""
    elif p_against <= ALPHA:
        status, more = Status.OPPOSED, opposed
    else:
        status, more = Status.UNDECIDED, undecided
    return replace(empty, status=status, reason=reason + more, p_for=p_for, p_against=p_against)


def _interval(estimated: Estimate, data: Differences) -> Interval:
    interval, (low, high) = estimated.interval(LEVEL), data.bounds or (-float("inf"), float("inf"))
    return Interval(max(low, interval.low), min(high, interval.high), LEVEL)


def _events(empty: Finding, counts: Events, test: str, one_run: bool) -> Finding:
    """Return the finding of a test of events. test: `more`, `fewer` or `equal`, which events can only oppose."""
    ours, of, base, base_of = counts.events, counts.of, counts.baseline_events, counts.baseline_of
    if not of or not base_of:
        return replace(empty, reason="no data: an arm has no finished trial")
    more, fewer = fisher(ours, of, base, base_of)
    p_for, p_against = (more, fewer) if test == "more" else (fewer, more)
    if test == "equal":
        p_for, p_against = 1.0, min(1.0, 2 * min(more, fewer))
    what = "diverged in" if empty.n else "the event occurred in"
    reason = f"{what} {ours} of {of} trials of ours and {base} of {base_of} of the baseline"
    empty = replace(empty, n=of, unit="trial", effect=None)
    if one_run and of == base_of == 1 and ours != base:
        status = Status.SUPPORTED if test == ("more" if ours else "fewer") else Status.OPPOSED
        return replace(empty, status=status, reason=reason, notes=(*empty.notes, ONE_RUN))
    return _decided(empty, p_for, p_against, reason)
