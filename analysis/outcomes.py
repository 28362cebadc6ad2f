"""Tables of outcomes: a paper's losses and task scores beside ours.

Levels of loss belong to their data, tokenizer and model: ours and a paper's do not compare, and no difference is shown.
What compares is each arm's change from a baseline, so every loss has a second row that gives it in percent, for ours
paired seed by seed. Question answering is out of reach of models this small; loss on text of another kind, and a cloze
task where the scale asks for one, stand in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fewbits.analysis.arms import Where
from fewbits.analysis.cells import BLANK, PERCENT, change, level
from fewbits.analysis.engine.frames import Metric, Results
from fewbits.analysis.engine.paper import Row, Table
from fewbits.analysis.results import OutOfReach, TableCell, TableResult, TableRow

TASKS = OutOfReach("question answering needs models of billions of parameters")
STAND_INS = {
    "Loss on other text": "ood_loss",
    "Cloze": "validation_cloze.accuracy",
    "Cloze on other text": "ood_cloze.accuracy",
}


@dataclass(frozen=True)
class Column:
    """Of a table of outcomes: an arm of ours, and the paper's column that stands beside it."""

    title: str
    arm: str
    where: Where = field(default_factory=dict)
    baseline: str | None = None  # the arm that it is compared with
    said: str | None = None  # id of the paper's column; None: ours alone
    of: Results | None = None  # where the arm is run, if not where the others are

    def of_paper(self, said: Table, row: str) -> float | None:
        return None if self.said is None else said.value(row, self.said)


def outcomes(
    results: Results,
    said: Table,
    columns: Sequence[Column],
    notes: tuple[str, ...],
    *,
    beside: str = "BF16",
    stand_ins: Mapping[str, str] = STAND_INS,
) -> TableResult:
    """beside: what changes are from, in words. stand_ins: metrics by title, in place of tasks."""
    metrics: dict[str, Metric] = {"loss": results.late("loss"), "validation_loss": "validation_loss"}
    rows: list[TableRow] = []
    for row in said.rows:
        if row.id in metrics:
            rows += _loss(results, said, row, metrics[row.id], columns, beside)
    for title, metric in stand_ins.items():
        rows += _stand_in(results, title, metric, columns, beside)
    for row in said.rows:
        if row.id not in metrics:
            source = row.source or said.source
            cells = (TableCell(TASKS, c.of_paper(said, row.id), source) if c.said else BLANK for c in columns)
            rows.append(TableRow(row.title, tuple(cells), row.unit))
    return TableResult(tuple(column.title for column in columns), tuple(rows), notes)


def _loss(
    results: Results, said: Table, row: Row, metric: Metric, columns: Sequence[Column], beside: str
) -> list[TableRow]:
    source = row.source or said.source
    levels, changes = [], []
    for c in columns:
        levels.append(level(c.of or results, metric, c.arm, c.where, c.of_paper(said, row.id), source))
        change_said = None if c.said is None else said.change(row.id, c.said)
        in_percent = None if change_said is None else PERCENT * change_said
        changes.append(
            BLANK
            if c.baseline is None
            else change(c.of or results, metric, c.arm, c.baseline, c.where, in_percent, source)
        )
    return [
        TableRow(row.title, tuple(levels), row.unit),
        TableRow(f"{row.title}, change from {beside}", tuple(changes), "%"),
    ]


def _stand_in(results: Results, title: str, metric: str, columns: Sequence[Column], beside: str) -> list[TableRow]:
    """Rows of ours alone; none where this scale's trials have no such number."""
    if metric not in results.metrics():
        return []
    found = [level(c.of or results, metric, c.arm, c.where) for c in columns]
    changes = [
        BLANK if c.baseline is None else change(c.of or results, metric, c.arm, c.baseline, c.where) for c in columns
    ]
    unit = "nats" if "loss" in metric else "of 1"
    return [
        TableRow(f"{title} (ours, in place of tasks)", tuple(found), unit),
        TableRow(f"{title}, change from {beside} (ours)", tuple(changes), "%"),
    ]
