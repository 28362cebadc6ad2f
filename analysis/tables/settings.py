"""Make tables of hyper-parameters: the paper's settings beside those in the configs of our trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import Table as PaperTable
from fewbits.analysis.engine.results.places import Where, not_planned, trial_ids
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow
from fewbits.analysis.views.html import number
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.registry import parameters
from fewbits.sweeps.planning.cost import tokens_of, work_of


@dataclass(frozen=True)
class Lineage:
    """The trials that lead to an arm's result: its trunks from first to last, if there are any, and its own trial."""

    trials: tuple[Trial, ...]

    @property
    def arm(self) -> Trial:
        """The arm's own trial."""
        return self.trials[-1]


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
        ours = Setting(describe(Lineage(_line(self.part, trials[0]))), trials, assumed=value is None)
        return TableCell(ours, value, source, comparable=False)


def _line(results: Results, trial: str) -> tuple[Trial, ...]:
    """Return the trial with this id after its ancestors (parent, its parent …), oldest first."""
    planned = results.plan.trials[trial]
    return (*(() if planned.parent is None else _line(results, planned.parent)), planned.trial)


def settings_table(
    printed: PaperTable, columns: Sequence[SettingsColumn], unstated: Mapping[str, Describe], notes: Sequence[str]
) -> TableResult:
    """Return a table of the paper's settings beside ours.

    printed: the paper's table; its row ids are keys of SETTINGS, and it has as many columns as `columns`. unstated: by
    title, further rows of settings that the paper does not state.
    """
    rows = [TableRow("Model", tuple(column.cell(model, column.model, printed.source) for column in columns))]
    for row in printed.rows:
        values = zip(columns, row.values or row.text, strict=True)
        source = row.source or printed.source
        cells = (column.cell((SETTINGS | dict(column.settings))[row.id], value, source) for column, value in values)
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    for title, describe in unstated.items():
        rows.append(TableRow(title, tuple(column.cell(describe, None) for column in columns)))
    return TableResult(
        tuple(column.title for column in printed.columns),
        tuple(rows),
        (*notes, "Assumed: the paper does not state this setting, so we chose it"),
    )


def model(line: Lineage) -> str:
    """Return the name of the model that an arm trains, and the model's number of parameters."""
    return f"{line.arm.model.name}, {parameters(line.arm.model) / 1e6:,.1f} M parameters"


def _warmup(line: Lineage) -> str:
    first = line.trials[0]
    steps = first.schedule.warmup_steps or round(first.schedule.warmup_fraction * first.training.steps)
    return f"{steps:,} steps"


def _final_rate(line: Lineage) -> str:
    arm = line.arm
    return f"{arm.optimizer.lr * factor(arm.schedule, arm.training.steps - 1, arm.training.steps):.2g}"


def _optimizer(line: Lineage) -> str:
    o = line.arm.optimizer
    return f"{o.kind}, β {o.beta1:g} and {o.beta2:g}, weight decay {o.weight_decay:g}, gradients clipped at {o.clip:g}"


# Id of the row in a paper's table → function that returns our setting.
SETTINGS: dict[str, Describe] = {
    "data": lambda line: f"{line.arm.data.kind}, {line.arm.data.tokenizer}",
    "tokens": lambda line: number(sum(map(tokens_of, line.trials))),
    "schedule": lambda line: ", then ".join(f"{t.schedule.kind} for {t.training.steps:,} steps" for t in line.trials),
    "peak": lambda line: f"{max(t.optimizer.lr for t in line.trials):.2g}",
    "final": _final_rate,
    "batch": lambda line: f"{line.arm.training.batch:,}",
}
# Settings that papers do not state: title of our row → function that returns our setting.
UNSTATED: dict[str, Describe] = {
    "Sequence": lambda line: f"{line.arm.training.length:,} tokens",
    "Warm-up": _warmup,
    "Optimizer": _optimizer,
    "FLOPs of one arm": lambda line: number(float(f"{sum(map(work_of, line.trials)):.2g}")),
}
