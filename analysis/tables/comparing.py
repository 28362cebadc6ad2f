"""Compare an arm with its baseline for tables and figures.

Pairs of trials are the same as in the tests of claims. A metric is a column of `Results.trials`
(`validation_loss`), the mean of a curve over its last steps (`loss@late`), or a mapping {trial id: number}.
"""

from __future__ import annotations

from fewbits.analysis.engine.claims.pairs import Numbers, built_in, data_of
from fewbits.analysis.engine.claims.schema import Comparison, Part
from fewbits.analysis.engine.results.arms import BASELINE
from fewbits.analysis.engine.results.data import Data, Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric, sample
from fewbits.analysis.engine.results.places import ANYWHERE, Where, not_planned, scope_of


def compare(
    results: Results, metric: Metric, arm: str, baseline: str = BASELINE, where: Where = ANYWHERE, sweep: str = ""
) -> Data | NotPlanned:
    """Return the relative differences, arm minus baseline, of the pairs of trials with equal seeds.

    where: axis values of the arm. sweep: the sweep to compare in; if empty, the first sweep that has both arms, or else
    all sweeps together.
    """
    part = Part("lower", arms=(arm,), baseline=baseline, sweep=(sweep,) if sweep else (), where=dict(where))
    name = metric if isinstance(metric, str) else "numbers"
    data = data_of(results, Comparison("", part, "", arm, baseline, name), lambda scope, _: resolve(scope, metric))
    assert isinstance(data, Differences | NoData | NotPlanned)
    return data


def own_numbers(results: Results, metric: Metric, arm: str, where: Where = ANYWHERE) -> Data | NotPlanned:
    """Return the metric's values in the arm's trials, one for each seed. where: axis values of the arm."""
    found = scope_of(results, (arm,), where=where)
    if found is None:
        return not_planned(results)
    scope = found.results
    values = _values(scope, metric)
    if isinstance(values, str) and values not in scope.metrics():
        return NoData(f"no trial has recorded the metric {values}")
    return sample(scope, values, arm, where)


def resolve(results: Results, metric: Metric) -> Numbers:
    """Return a metric as Numbers, with its name and values; a mapping of numbers gets the name `numbers`."""
    return built_in(results, metric) if isinstance(metric, str) else Numbers("numbers", metric)


def _values(results: Results, metric: Metric) -> Metric:
    values = resolve(results, metric).values
    assert not callable(values)
    return values
