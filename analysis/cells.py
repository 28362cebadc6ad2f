"""Cells of tables: an arm's number, or how far it is from a baseline in percent, each with its trials."""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.arms import ANYWHERE, BASELINE, Where, compared, own
from fewbits.analysis.engine.data import Data, Differences
from fewbits.analysis.engine.frames import Metric, Results
from fewbits.analysis.engine.statistics import summary
from fewbits.analysis.results import NotRun, Setting, TableCell, Value

PERCENT = 100.0
BLANK = TableCell(Setting("", ()))


def level(
    results: Results, metric: Metric, arm: str, where: Where = ANYWHERE, paper: float | None = None, source: str = ""
) -> TableCell:
    """A loss: of other data and another tokenizer than the paper's, so that the two levels do not compare."""
    return cell(own(results, metric, arm, where), paper=paper, source=source, comparable=False)


def change(
    results: Results,
    metric: Metric,
    arm: str,
    baseline: str = BASELINE,
    where: Where = ANYWHERE,
    paper: float | None = None,
    source: str = "",
) -> TableCell:
    """In percent of the baseline."""
    return cell(compared(results, metric, arm, baseline, where), PERCENT, paper, source)


def share(
    results: Results, shares: Mapping[str, float], arm: str, where: Where = ANYWHERE, paper: float | None = None
) -> TableCell:
    """In percent."""
    return cell(own(results, shares, arm, where), PERCENT, paper, "inferred" if paper is not None else "")


def cell(
    found: Data | NotRun, factor: float = 1.0, paper: float | None = None, source: str = "", comparable: bool = True
) -> TableCell:
    ours = found if isinstance(found, NotRun) else Value.of(found)
    return TableCell(ours.times(factor) if isinstance(ours, Value) else ours, paper, source, comparable)


def spread(found: Data | NotRun, factor: float = PERCENT) -> TableCell:
    """Standard deviation over seeds."""
    if not isinstance(found, Differences) or len(found.values) < 2:
        return cell(found) if not isinstance(found, Differences) else TableCell(Setting("one seed", found.trials))
    sd = summary(found.values).sd
    assert sd is not None
    return TableCell(Value(sd * factor, None, len(found.values), found.trials))
