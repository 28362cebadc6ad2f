"""Make cells of tables from an arm's trials: its mean, its change from a baseline in percent, or its spread over seeds.

Common arguments: where: axis values of the arm. paper: the paper's number, which is shown beside ours. source: where
the paper's number is from.
"""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.engine.results.arms import BASELINE
from fewbits.analysis.engine.results.data import Data, Differences, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric
from fewbits.analysis.engine.results.places import ANYWHERE, Where
from fewbits.analysis.engine.statistics import summary
from fewbits.analysis.report.items import Setting, TableCell, Value
from fewbits.analysis.tables.comparing import compare, own_numbers

PERCENT = 100.0
BLANK = TableCell(Setting(""))
UNKNOWN = TableCell(Setting("not known"))


def level(
    results: Results, metric: Metric, arm: str, where: Where = ANYWHERE, paper: float | None = None, source: str = ""
) -> TableCell:
    """Return the arm's mean of the metric beside the paper's number.

    The difference is not shown, since our data and tokenizer differ from the paper's.
    """
    return cell(own_numbers(results, metric, arm, where), paper=paper, source=source, comparable=False)


def change(
    results: Results,
    metric: Metric,
    arm: str,
    baseline: str = BASELINE,
    where: Where = ANYWHERE,
    *,
    sweep: str = "",
    paper: float | None = None,
    source: str = "",
) -> TableCell:
    """Return the arm's mean change from the baseline in percent, over pairs of trials with equal seeds.

    sweep: the sweep to compare in; if empty, the first sweep that has both arms, or else all sweeps together.
    """
    return cell(compare(results, metric, arm, baseline, where, sweep), PERCENT, paper, source)


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


def spread(data: Data | NotPlanned, factor: float = PERCENT) -> TableCell:
    """Return the standard deviation of the data over seeds, times a factor, or the reason why there is none."""
    if not isinstance(data, Differences) or len(data.values) < 2:
        return cell(data) if not isinstance(data, Differences) else TableCell(Setting("one seed", data.trials))
    sd = summary(data.values).sd
    assert sd is not None
    return TableCell(Value(sd * factor, None, len(data.values), data.trials))
