"""Tables of losses and scores: a paper's numbers beside ours.

Levels of loss depend on their data, tokenizer and model: ours and a paper's do not compare, and no difference is shown.
What compares is each arm's change from a baseline, so every loss has a second row with it in percent, ours paired seed
by seed. Question answering is out of reach of models this small; loss on text of another kind, and a cloze task where
the scale asks for one, stand in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fewbits.analysis.engine.arms import arm_table
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.pairing import Metric
from fewbits.analysis.engine.paper import Table, paper
from fewbits.analysis.engine.places import Where
from fewbits.analysis.report.items import OutOfReach, TableCell, TableResult, TableRow
from fewbits.analysis.tables.cells import BLANK, PERCENT, change, level

TASKS = OutOfReach("question answering needs models of billions of parameters")
STAND_INS = {
    "Loss on other text": "ood_loss",
    "Cloze": "validation_cloze.accuracy",
    "Cloze on other text": "ood_cloze.accuracy",
}
NOTES = (
    "Losses are of other models, data and tokens than the paper's, so levels do not compare. Changes do: each is the "
    "arm's from BF16 in the same configuration, ours paired by seed; ± is a 95 % interval",
    "Training losses are means over the last tenth of the steps, the same batches in all arms of a seed",
)


@dataclass(frozen=True)
class LossColumn:
    """An arm of ours, and the paper's column beside it."""

    title: str
    arm: str
    where: Where = field(default_factory=dict)
    baseline: str | None = None  # the arm that it is compared with
    printed: str | None = None  # id of the paper's column; None: ours alone
    part: Results | None = None  # where the arm is run, if not where the others are

    def level(self, results: Results, metric: Metric, said: float | None = None, source: str = "") -> TableCell:
        return level(self.part or results, metric, self.arm, self.where, said, source)

    def change(self, results: Results, metric: Metric, said: float | None = None, source: str = "") -> TableCell:
        if self.baseline is None:
            return BLANK
        part = self.part or results
        return change(part, metric, self.arm, self.baseline, self.where, paper=said, source=source)


def paper_losses(results: Results, study: str, name: str, notes: Sequence[str] = NOTES) -> TableResult:
    """Return a table of the paper whose columns are arms of the study's table of arms."""
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
    """Return the paper's losses and scores beside ours. baseline: its name in titles; stand_ins: metrics by title."""
    metrics = {"loss": "loss@late", "validation_loss": "validation_loss"}
    rows: list[TableRow] = []
    for row in (row for row in printed.rows if row.id in metrics):
        source = row.source or printed.source
        levels, changes = [], []
        for column in columns:
            said = change_said = None
            if column.printed is not None:
                said, change_said = printed.value(row.id, column.printed), printed.change(row.id, column.printed)
            levels.append(column.level(results, metrics[row.id], said, source))
            in_percent = None if change_said is None else PERCENT * change_said
            changes.append(column.change(results, metrics[row.id], in_percent, source))
        rows.append(TableRow(row.title, tuple(levels), row.unit))
        rows.append(TableRow(f"{row.title}, change from {baseline}", tuple(changes), "%"))
    for title, metric in stand_ins.items():
        rows += _stand_in(results, title, metric, columns, baseline)
    for row in (row for row in printed.rows if row.id not in metrics):
        source = row.source or printed.source
        cells = (TableCell(TASKS, printed.value(row.id, c.printed), source) if c.printed else BLANK for c in columns)
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    return TableResult(tuple(column.title for column in columns), tuple(rows), tuple(notes))


def _stand_in(
    results: Results, title: str, metric: str, columns: Sequence[LossColumn], baseline: str
) -> Iterator[TableRow]:
    """Yield rows of ours alone; none where this scale's trials have no such number."""
    if metric in results.metrics():
        unit = "nats" if "loss" in metric else "of 1"
        levels = tuple(column.level(results, metric) for column in columns)
        changes = tuple(column.change(results, metric) for column in columns)
        yield TableRow(f"{title} (ours, in place of tasks)", levels, unit)
        yield TableRow(f"{title}, change from {baseline} (ours)", changes, "%")
