"""Make cells of tables from an arm's trials: its mean, or its change from a baseline in percent.

Pairs of trials are the same as in the tests of claims. A metric is a column of `Results.trials` (`validation_loss`),
the mean of a curve over its last steps (`loss@late`), or a mapping {trial id: number}. where: axis values of the arm.
paper: the paper's number, which is shown beside ours. source: where the paper's number is from.
"""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.engine.claims.pairs import Numbers, built_in, data_of
from fewbits.analysis.engine.claims.schema import Comparison, Part
from fewbits.analysis.engine.results.arms import BASELINE
from fewbits.analysis.engine.results.data import Data, Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric, sample
from fewbits.analysis.engine.results.places import ANYWHERE, Where, not_planned, scope_of
from fewbits.analysis.report.items import Setting, TableCell, Value

PERCENT = 100.0
BLANK = TableCell(Setting(""))


def compare(
    results: Results, metric: Metric, arm: str, baseline: str = BASELINE, where: Where = ANYWHERE, sweep: str = ""
) -> Data | NotPlanned:
    """Return the relative differences, arm minus baseline, of the pairs of trials with equal seeds.

    sweep: the sweep to compare in; if empty, the first sweep that has both arms, or else all sweeps together.
    """
    part = Part("lower", arms=(arm,), baseline=baseline, sweep=(sweep,) if sweep else (), where=dict(where))
    name = metric if isinstance(metric, str) else "numbers"
    data = data_of(results, Comparison("", part, "", arm, baseline, name), lambda scope, _: _numbers(scope, metric))
    assert isinstance(data, Differences | NoData | NotPlanned)
    return data


def own_numbers(results: Results, metric: Metric, arm: str, where: Where = ANYWHERE) -> Data | NotPlanned:
    """Return the metric's values in the arm's trials, one for each seed."""
    found = scope_of(results, (arm,), where=where)
    if found is None:
        return not_planned(results)
    values = _numbers(found.results, metric).values
    assert not callable(values)
    if isinstance(values, str) and values not in found.results.metrics():
        return NoData(f"no trial has recorded the metric {values}")
    return sample(found.results, values, arm, where)


def _numbers(results: Results, metric: Metric) -> Numbers:
    return built_in(results, metric) if isinstance(metric, str) else Numbers("numbers", metric)


def change(
    results: Results,
    metric: Metric,
    arm: str,
    baseline: str = BASELINE,
    where: Where = ANYWHERE,
    *,
    paper: float | None = None,
    source: str = "",
) -> TableCell:
    """Return the arm's mean change from the baseline in percent, over pairs of trials with equal seeds."""
    return cell(compare(results, metric, arm, baseline, where), PERCENT, paper, source)


def share(
    results: Results, shares: Mapping[str, float], arm: str, where: Where = ANYWHERE, paper: float | None = None
) -> TableCell:
    """Return the mean of the arm's shares in percent. shares: {trial id: share from 0 to 1}; paper: a percentage."""
    return cell(own_numbers(results, shares, arm, where), PERCENT, paper, "inferred" if paper is not None else "")


def cell(
    data: Data | NotPlanned,
    factor: float = 1.0,
    paper: float | None = None,
    source: str = "",
    comparable: bool = True,
) -> TableCell:
    """Return the mean of the data times a factor, or the reason for missing data, beside the paper's number.

    comparable: show the difference between our number and the paper's.
    """
    ours = data if isinstance(data, NotPlanned) else Value.of(data)
    return TableCell(ours.times(factor) if isinstance(ours, Value) else ours, paper, source, comparable)
