"""Compare an arm with its baseline for tables and figures.

Pairs of trials and pooled spreads are the same as in the tests of claims. A pooled spread is a standard deviation over
seeds that is estimated from several arms (results/pooling.py). A metric is a column of `Results.trials`
(`validation_loss`), the mean of a curve over its last steps (`loss@late`), or a mapping {trial id: number}.
"""

from __future__ import annotations

from fewbits.analysis.engine.claims.pairs import Numbers, built_in, data_of, scope_of
from fewbits.analysis.engine.claims.schema import Comparison, Part
from fewbits.analysis.engine.results.arms import BASELINE
from fewbits.analysis.engine.results.data import Data, Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric, Where, sample
from fewbits.analysis.engine.results.places import ANYWHERE, not_planned
from fewbits.analysis.engine.results.pooling import pools_of
from fewbits.analysis.engine.statistics.estimates import Pools


def compare(
    results: Results, metric: Metric, arm: str, baseline: str = BASELINE, where: Where = ANYWHERE, sweep: str = ""
) -> Data | NotPlanned:
    """Return the relative differences, arm minus baseline, of the pairs of trials with equal seeds.

    They have a spread that is pooled over arms with the same model, optimizer, schedule and trunk (results/pooling.py).
    where: axis values of the arm. sweep: the sweep to compare in; if empty, the first sweep that has both arms, or else
    all sweeps together.
    """
    part = Part("lower", arms=(arm,), baseline=baseline, sweep=sweep, where=dict(where))
    name = metric if isinstance(metric, str) else "numbers"
    data = data_of(
        results, Comparison("", part, "", arm, baseline, name, where), lambda scope, _: resolve(scope, metric)
    )
    assert isinstance(data, Differences | NoData | NotPlanned)
    return data


def own_numbers(results: Results, metric: Metric, arm: str, where: Where = ANYWHERE) -> Data | NotPlanned:
    """Return the metric's values in the arm's trials, one for each seed. where: axis values of the arm."""
    scope = scope_of(results, (arm,), where=where)
    if scope is None:
        return not_planned(results)
    values = _values(scope, metric)
    if isinstance(values, str) and values not in scope.metrics():
        return NoData(f"no trial has recorded the metric {values}")
    return sample(scope, values, arm, where)


def pools(results: Results, metric: Metric, baseline: str = BASELINE, where: Where = ANYWHERE) -> Pools | None:
    """Return, for each kind of arms, the spread over seeds of the difference between two arms of this kind.

    One kind, for example, is all arms whose forward passes have formats of fewer than 8 bits (results/pooling.py). The
    spread is pooled over all arms of a kind that have the baseline's model, optimizer, schedule and trunk. Return None
    if the baseline is not planned or nothing can be pooled. where: use only trials with these axis values.
    """
    scope = scope_of(results, (baseline,), where=where)
    return None if scope is None else pools_of(results, scope, _values(results, metric), baseline, where)


def resolve(results: Results, metric: Metric) -> Numbers:
    """Return a metric as Numbers, with its name and values; a mapping of numbers gets the name `numbers`."""
    return built_in(results, metric) if isinstance(metric, str) else Numbers("numbers", metric)


def _values(results: Results, metric: Metric) -> Metric:
    values = resolve(results, metric).values
    assert not callable(values)
    return values
