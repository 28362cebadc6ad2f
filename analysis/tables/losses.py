"""Make tables of losses and task scores with a paper's numbers beside ours.

Losses depend on data, tokenizer and model, so our losses and the paper's cannot be compared, and their difference is
not shown. Changes from a baseline can be compared. So each loss has a second row with the change in percent; our change
is computed from pairs of trials with equal seeds. Our small models cannot answer the questions of the paper's tasks. In
place of task scores, a table has the loss on text of another kind. Scores of the paper's tasks are shown for trials
that `fewbits evaluate` has evaluated on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.evaluations import best_of_recent, paper_tasks, scores_over_training
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric
from fewbits.analysis.engine.results.paper import Row, Table, paper
from fewbits.analysis.engine.results.places import Where
from fewbits.analysis.report.items import OutOfReach, TableCell, TableResult, TableRow
from fewbits.analysis.tables.cells import BLANK, PERCENT, cell, change, level
from fewbits.analysis.tables.comparing import own_numbers
from fewbits.experiments.evaluation.tasks import Task

TASKS = OutOfReach("question answering needs models of billions of parameters")
BEST = ", best of recent checkpoints"  # the end of the titles of rows in a paper's table
STAND_INS = {  # title of the row → our metric
    "Loss on other text": "ood_loss",
}
NOTES = (
    "Our models, data and numbers of tokens differ from the paper's, so only changes can be compared, not losses. A "
    "change is the arm's change from BF16 in the same configuration; ours is paired by seed, and ± is a 95 % interval",
    "Training losses are means over the last tenth of the steps; all arms of a seed have the same batches",
)


@dataclass(frozen=True)
class LossColumn:
    """A column of the table: an arm of ours, and the column of the paper's table that shows this arm."""

    title: str
    arm: str
    where: Where = field(default_factory=dict)  # axis values of the arm
    baseline: str | None = None  # the arm that this arm is compared with
    printed: str | None = None  # the id of the paper's column; None if the paper has no such column
    part: Results | None = None  # the results that have the arm; None for the results of the whole table

    def level(self, results: Results, metric: Metric, paper: float | None = None, source: str = "") -> TableCell:
        """Return a cell with the arm's mean of the metric beside the paper's number, without their difference.

        paper: the paper's number. source: where the paper's number is from.
        """
        return level(self.part or results, metric, self.arm, self.where, paper, source)

    def change(self, results: Results, metric: Metric, paper: float | None = None, source: str = "") -> TableCell:
        """Return a cell with the arm's change from its baseline in percent; blank if the column has no baseline.

        paper: the paper's change in percent, which is shown beside ours. source: where the paper's number is from.
        """
        if self.baseline is None:
            return BLANK
        part = self.part or results
        return change(part, metric, self.arm, self.baseline, self.where, paper=paper, source=source)


def paper_losses(results: Results, study: str, name: str, notes: Sequence[str] = NOTES) -> TableResult:
    """Return the paper's table of losses with our numbers beside the paper's; ours are from the arms in arms.yaml.

    name: the id of the paper's table. Raise ValueError if the table has a column to which no arm in arms.yaml belongs.
    """
    table, printed = arm_table(study), paper(study).table(name)
    columns = []
    for column in printed.columns:
        arm, where = table.of_column(name, column.id)
        baseline = None if column.baseline is None else table.of_column(name, column.baseline)[0]
        columns.append(LossColumn(column.heading, arm, where, baseline, column.id))
    return loss_table(results, printed, columns, notes)


def loss_table(
    results: Results,
    printed: Table,
    columns: Sequence[LossColumn],
    notes: Sequence[str],
    *,
    baseline: str = "BF16",
    stand_ins: Mapping[str, str] = STAND_INS,
) -> TableResult:
    """Return a table of the paper's losses and scores beside ours, for these columns.

    printed: the paper's table. baseline: the baseline's name in the titles of rows. stand_ins: title of a row → the
    metric of ours that the row shows in place of scores in question answering.
    """
    metrics = {"loss": "loss@late", "validation_loss": "validation_loss"}
    rows: list[TableRow] = []
    for row in (row for row in printed.rows if row.id in metrics):
        source = row.source or printed.source
        levels, changes = [], []
        for column in columns:
            value = value_change = None
            if column.printed is not None:
                value, value_change = printed.value(row.id, column.printed), printed.change(row.id, column.printed)
            levels.append(column.level(results, metrics[row.id], value, source))
            in_percent = None if value_change is None else PERCENT * value_change
            changes.append(column.change(results, metrics[row.id], in_percent, source))
        rows.append(TableRow(row.title, tuple(levels), row.unit))
        rows.append(TableRow(f"{row.title}, change from {baseline}", tuple(changes), "%"))
    for title, metric in stand_ins.items():
        rows += _stand_in(results, title, metric, columns, baseline)
    for row in (row for row in printed.rows if row.id not in metrics):
        cells = (_score(results, column, row, printed) for column in columns)
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    return TableResult(tuple(column.title for column in columns), tuple(rows), tuple(notes))


def _score(results: Results, column: LossColumn, row: Row, printed: Table) -> TableCell:
    """Return a cell with our score on one of the paper's tasks, in percent, beside the paper's score.

    If no trial of the column's arm was evaluated on the task, our score is shown as `out of reach`; if, in addition,
    the paper's table does not show this arm, the cell is blank. printed: the paper's table. row: its row for the task.
    """
    part, source = column.part or results, row.source or printed.source
    value = printed.value(row.id, column.printed) if column.printed else None
    title, best = row.title.removesuffix(BEST), row.title.endswith(BEST)
    scores = best_of_recent(scores_over_training(part, title)) if best else _scores(part, paper_tasks(title))
    if column.arm in {each["arm"] for each in part.rows if each["id"] in scores}:
        ours = own_numbers(part, scores, column.arm, column.where)
        return cell(ours, PERCENT, value, source, comparable=False)
    return BLANK if column.printed is None or (best and value is None) else TableCell(TASKS, value, source)


def _scores(results: Results, tasks: Sequence[Task]) -> dict[str, float]:
    """Return {trial id: mean score on the tasks} for the trials that were evaluated on all subtasks of the tasks."""
    names = [[f"tasks.{name}.{task.metric}" for name in task.names] for task in tasks]
    if not names or not {name for some in names for name in some} <= set(results.metrics()):
        return {}
    scores = {row["id"]: fmean(fmean(row[name] for name in some) for some in names) for row in results.rows}
    return {trial: score for trial, score in scores.items() if not math.isnan(score)}


def _stand_in(
    results: Results, title: str, metric: str, columns: Sequence[LossColumn], baseline: str
) -> Iterator[TableRow]:
    """Yield two rows of a metric of ours that the paper does not have: each column's mean, and its change in percent.

    Yield nothing if no trial has the metric. title: the metric's name in the titles of the rows. baseline: the
    baseline's name in the title of the second row.
    """
    if metric in results.metrics():
        levels = tuple(column.level(results, metric) for column in columns)
        changes = tuple(column.change(results, metric) for column in columns)
        yield TableRow(f"{title} (ours, in place of tasks)", levels, "nats")
        yield TableRow(f"{title}, change from {baseline} (ours)", changes, "%")
