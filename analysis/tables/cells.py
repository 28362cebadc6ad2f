"""Make cells of tables from an arm's trials, its mean or its change from a baseline; tables of losses and settings.

Pairs of trials are the same as in the tests of claims. where: axis values of the arm. paper, source: the paper's
number, which is shown beside ours, and where it is from.

Losses depend on data, tokenizer and model, so only changes from a baseline can be compared: each loss has a second row
with the change in percent. Small models cannot answer the questions of the paper's tasks, so the loss on text of
another kind stands in for scores, unless `fewbits evaluate` has evaluated trials on the tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fewbits.analysis.engine.claims.pairs import Numbers, built_in, data_of
from fewbits.analysis.engine.claims.schema import Comparison, Part
from fewbits.analysis.engine.results.data import Data, Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.evaluations import best_of_recent, paper_tasks, scores_over_training
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric, sample
from fewbits.analysis.engine.results.paper import Row, Table, paper
from fewbits.analysis.engine.results.places import (
    ANYWHERE,
    BASELINE,
    Where,
    arm_table,
    not_planned,
    scope_of,
    trial_ids,
)
from fewbits.analysis.report.items import OutOfReach, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.views.html import number
from fewbits.experiments.evaluation.tasks import Task
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.registry import parameters
from fewbits.sweeps.planning.cost import tokens_of, work_of

PERCENT = 100.0
BLANK = TableCell(Setting(""))


def compare(
    results: Results, metric: Metric, arm: str, baseline: str = BASELINE, where: Where = ANYWHERE, sweep: str = ""
) -> Data | NotPlanned:
    """Return the relative differences, arm minus baseline, of the pairs of trials with equal seeds."""
    part = Part("lower", arms=(arm,), baseline=baseline, sweep=(sweep,) if sweep else (), where=dict(where))
    name = metric if isinstance(metric, str) else "numbers"
    data = data_of(results, Comparison("", part, "", arm, baseline, name), lambda scope, _: _numbers(scope, metric))
    assert isinstance(data, Differences | NoData | NotPlanned)
    return data


def own_numbers(results: Results, metric: Metric, arm: str, where: Where = ANYWHERE) -> Data | NotPlanned:
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
    return cell(compare(results, metric, arm, baseline, where), PERCENT, paper, source)


def cell(
    data: Data | NotPlanned,
    factor: float = 1.0,
    paper: float | None = None,
    source: str = "",
    comparable: bool = True,
) -> TableCell:
    """Return the mean of the data times a factor, or the reason for missing data, beside the paper's number."""
    ours = data if isinstance(data, NotPlanned) else Value.of(data)
    return TableCell(ours.times(factor) if isinstance(ours, Value) else ours, paper, source, comparable)


# ------------------------------------------------------------------------------------------------ losses

TASKS = OutOfReach("question answering needs models of billions of parameters")
BEST = ", best of recent checkpoints"  # the end of the titles of rows in a paper's table
STAND_INS = {"Loss on other text": "ood_loss"}  # title of the row → our metric
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

    def numbers(self, results: Results, metric: Metric, paper: float | None = None, source: str = "") -> TableCell:
        """Return the arm's mean of the metric beside the paper's number, without their difference."""
        ours = own_numbers(self.part or results, metric, self.arm, self.where)
        return cell(ours, paper=paper, source=source, comparable=False)

    def change(self, results: Results, metric: Metric, paper: float | None = None, source: str = "") -> TableCell:
        """Return the arm's change from its baseline in percent; blank if the column has no baseline."""
        if self.baseline is None:
            return BLANK
        part = self.part or results
        return change(part, metric, self.arm, self.baseline, self.where, paper=paper, source=source)


def paper_losses(results: Results, study: str, name: str, notes: Sequence[str] = NOTES) -> TableResult:
    """Return the paper's table of losses with our numbers beside the paper's; ours are from the arms in arms.yaml."""
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
    """Return a table of losses and scores beside the paper's. stand_ins: row → the metric in place of scores."""
    metrics = {"loss": "loss@late", "validation_loss": "validation_loss"}
    rows: list[TableRow] = []
    for row in (row for row in printed.rows if row.id in metrics):
        source, metric = row.source or printed.source, metrics[row.id]
        known = [(one, printed.value(row.id, one.printed) if one.printed else None) for one in columns]
        moved = [(one, printed.change(row.id, one.printed) if one.printed else None) for one in columns]
        levels = (one.numbers(results, metric, value, source) for one, value in known)
        changes = (one.change(results, metric, value and PERCENT * value, source) for one, value in moved)
        rows.append(TableRow(row.title, tuple(levels), row.unit))
        rows.append(TableRow(f"{row.title}, change from {baseline}", tuple(changes), "%"))
    for title, metric in stand_ins.items():
        if metric in results.metrics():
            levels = (column.numbers(results, metric) for column in columns)
            changes = (column.change(results, metric) for column in columns)
            rows.append(TableRow(f"{title} (ours, in place of tasks)", tuple(levels), "nats"))
            rows.append(TableRow(f"{title}, change from {baseline} (ours)", tuple(changes), "%"))
    for row in (row for row in printed.rows if row.id not in metrics):
        cells = (_score(results, column, row, printed) for column in columns)
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    return TableResult(tuple(column.title for column in columns), tuple(rows), tuple(notes))


def _score(results: Results, column: LossColumn, row: Row, printed: Table) -> TableCell:
    """Return our score on a task beside the paper's; out of reach without ours, blank if the paper has none either."""
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


# ------------------------------------------------------------------------------------------------ settings


Lineage = tuple[Trial, ...]  # the trunks of an arm's trial, from first to last, and the trial itself
Describe = Callable[[Lineage], str]  # returns one setting as text


@dataclass(frozen=True)
class SettingsColumn:
    """A column of a table of settings: a model of the paper, and the arm of ours that is compared with it."""

    model: str  # the name of the paper's model
    part: Results | NotPlanned  # the results that have the arm
    arm: str
    where: Where = field(default_factory=dict)  # axis values of the arm
    settings: Mapping[str, Describe] = field(default_factory=dict)  # additions to SETTINGS for this column

    def cell(self, describe: Describe, value: float | str | None, source: str = "") -> TableCell:
        """Return one setting of the arm's first trial beside the paper's `value`; without one, ours is assumed."""
        if isinstance(self.part, NotPlanned):
            return TableCell(self.part, value, source, comparable=False)
        trials = tuple(trial_ids(self.part, self.arm, self.where).values())
        if not trials:
            return TableCell(not_planned(self.part), value, source, comparable=False)
        ours = Setting(describe(_line(self.part, trials[0])), trials, assumed=value is None)
        return TableCell(ours, value, source, comparable=False)


def _line(results: Results, trial: str) -> Lineage:
    """Return the trial with this id after its ancestors (parent, its parent …), oldest first."""
    planned = results.plan.trials[trial]
    return (*(() if planned.parent is None else _line(results, planned.parent)), planned.trial)


def settings_table(
    printed: Table, columns: Sequence[SettingsColumn], unstated: Mapping[str, Describe], notes: Sequence[str]
) -> TableResult:
    """Return the paper's settings beside ours; its row ids are keys of SETTINGS. unstated: further rows, by title."""
    rows = [TableRow("Model", tuple(column.cell(model, column.model, printed.source) for column in columns))]
    for row in printed.rows:
        values = zip(columns, row.values or row.text, strict=True)
        source = row.source or printed.source
        cells = (column.cell((SETTINGS | dict(column.settings))[row.id], value, source) for column, value in values)
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    for title, describe in unstated.items():
        rows.append(TableRow(title, tuple(column.cell(describe, None) for column in columns)))
    assumed = "Assumed: the paper does not state this setting, so we chose it"
    return TableResult(tuple(column.title for column in printed.columns), tuple(rows), (*notes, assumed))


def model(line: Lineage) -> str:
    return f"{line[-1].model.name}, {parameters(line[-1].model) / 1e6:,.1f} M parameters"


def _warmup(line: Lineage) -> str:
    first = line[0]
    steps = first.schedule.warmup_steps or round(first.schedule.warmup_fraction * first.training.steps)
    return f"{steps:,} steps"


def _final_rate(line: Lineage) -> str:
    arm = line[-1]
    return f"{arm.optimizer.lr * factor(arm.schedule, arm.training.steps - 1, arm.training.steps):.2g}"


def _optimizer(line: Lineage) -> str:
    o = line[-1].optimizer
    return f"{o.kind}, β {o.beta1:g} and {o.beta2:g}, weight decay {o.weight_decay:g}, gradients clipped at {o.clip:g}"


# Id of the row in a paper's table → function that returns our setting.
SETTINGS: dict[str, Describe] = {
    "data": lambda line: f"{line[-1].data.kind}, {line[-1].data.tokenizer}",
    "tokens": lambda line: number(sum(map(tokens_of, line))),
    "schedule": lambda line: ", then ".join(f"{t.schedule.kind} for {t.training.steps:,} steps" for t in line),
    "peak": lambda line: f"{max(t.optimizer.lr for t in line):.2g}",
    "final": _final_rate,
    "batch": lambda line: f"{line[-1].training.batch:,}",
}
# Settings that papers do not state: title of our row → function that returns our setting.
UNSTATED: dict[str, Describe] = {
    "Sequence": lambda line: f"{line[-1].training.length:,} tokens",
    "Warm-up": _warmup,
    "Optimizer": _optimizer,
    "FLOPs of one arm": lambda line: number(float(f"{sum(map(work_of, line)):.2g}")),
}
