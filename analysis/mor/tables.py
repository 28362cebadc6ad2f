"""MoR's Tables 1 to 4: the paper's numbers beside ours.

Levels of loss belong to their data, tokenizer and model: ours and the paper's do not compare, and no difference is
shown. What compares is each arm's change from BF16, so every loss has a second row that gives it in percent, for ours
paired seed by seed. Question answering is out of reach of models this small; loss on text of another kind, and a cloze
task where the scale asks for one, stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fewbits.analysis.frames import Metric, Results
from fewbits.analysis.mor.arms import ONE, TWO, Where, having, ids
from fewbits.analysis.mor.cells import BLANK, PERCENT, change, level
from fewbits.analysis.paper import Column, Row, Table, paper
from fewbits.analysis.registry import table
from fewbits.analysis.results import NotRun, OutOfReach, Setting, TableCell, TableResult, TableRow
from fewbits.analysis.show.markup import number
from fewbits.experiments.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.registry import parameters
from fewbits.sweeps.cost import tokens_of, work_of

TASKS = OutOfReach("question answering needs models of billions of parameters")
STAND_INS = {
    "Loss on other text": "ood_loss",
    "Cloze": "validation_cloze.accuracy",
    "Cloze on other text": "ood_cloze.accuracy",
}
LEVELS = (
    "Losses are of other models, data and tokens than the paper's, so that levels do not compare. Changes do: each is "
    "of the arm from BF16 in the same configuration, ours paired by seed, with 95 % intervals"
)
LATE = "Training losses are means over the last tenth of the steps, the same batches in all arms of a seed"


@table("mor", "Table 2")
def table_2(results: Results) -> TableResult:
    def place(column: Column) -> tuple[str, Where]:
        configuration, arm = column.id.split("-", 1)
        return arm, {"c1": ONE, "c2": TWO}[configuration]

    return _outcomes(results, "Table 2", place)


@table("mor", "Table 3")
def table_3(results: Results) -> TableResult:
    return _outcomes(results, "Table 3", lambda column: (column.id, ONE))


@table("mor", "Table 4")
def table_4(results: Results) -> TableResult:
    return _outcomes(results, "Table 4", lambda column: (column.id, ONE))


def _outcomes(results: Results, name: str, place: Callable[[Column], tuple[str, Where]]) -> TableResult:
    said = paper("mor").table(name)
    metrics: dict[str, Metric] = {"loss": results.late("loss"), "validation_loss": "validation_loss"}
    losses = [row for row in said.rows if row.id in metrics]
    rows = [made for row in losses for made in _loss(results, said, row, metrics[row.id], place)]
    for title, metric in STAND_INS.items():
        rows += _stand_in(results, said, title, metric, place)
    rows += [
        TableRow(row.title, tuple(TableCell(TASKS, v, row.source or said.source) for v in row.values), row.unit)
        for row in said.rows
        if row.id not in metrics
    ]
    groups = [f"{column.group}: {column.title}" if column.group else column.title for column in said.columns]
    return TableResult(tuple(groups), tuple(rows), (LEVELS, LATE))


def _loss(
    results: Results, said: Table, row: Row, metric: Metric, place: Callable[[Column], tuple[str, Where]]
) -> list[TableRow]:
    source = row.source or said.source
    levels, changes = [], []
    for column in said.columns:
        arm, where = place(column)
        levels.append(level(results, metric, arm, where, said.value(row.id, column.id), source))
        change_said = said.change(row.id, column.id)
        in_percent = None if change_said is None else PERCENT * change_said
        changes.append(
            change(results, metric, arm, place(_baseline(said, column))[0], where, in_percent, source)
            if column.baseline
            else BLANK
        )
    return [
        TableRow(row.title, tuple(levels), row.unit),
        TableRow(f"{row.title}, change from BF16", tuple(changes), "%"),
    ]


def _baseline(said: Table, column: Column) -> Column:
    return next(other for other in said.columns if other.id == column.baseline)


def _stand_in(
    results: Results, said: Table, title: str, metric: str, place: Callable[[Column], tuple[str, Where]]
) -> list[TableRow]:
    """Rows of ours alone; none where this scale's trials have no such number."""
    if metric not in results.metrics():
        return []
    found = [level(results, metric, *place(column)) for column in said.columns]
    rows = [TableRow(f"{title} (ours, in place of tasks)", tuple(found), "nats" if "loss" in metric else "of 1")]
    changes = [
        change(results, metric, place(c)[0], place(_baseline(said, c))[0], place(c)[1]) if c.baseline else BLANK
        for c in said.columns
    ]
    return [*rows, TableRow(f"{title}, change from BF16 (ours)", tuple(changes), "%")]


# -------------------------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Line:
    """The trials that lead to a result: a trunk, if there is one, and the arm."""

    trials: tuple[Trial, ...]

    @property
    def arm(self) -> Trial:
        return self.trials[-1]

    @staticmethod
    def of(results: Results, name: str) -> Line:
        found, at = [], results.plan.trials[name]
        found.append(at.trial)
        while at.parent is not None:
            at = results.plan.trials[at.parent]
            found.append(at.trial)
        return Line(tuple(reversed(found)))


def _schedule(line: Line) -> str:
    return ", then ".join(f"{t.schedule.kind} for {t.training.steps:,} steps" for t in line.trials)


def _warmup(line: Line) -> str:
    first = line.trials[0]
    steps = first.schedule.warmup_steps or round(first.schedule.warmup_fraction * first.training.steps)
    return f"{steps:,} steps"


def _final(line: Line) -> str:
    arm = line.arm
    return f"{arm.optimizer.lr * factor(arm.schedule, arm.training.steps - 1, arm.training.steps):.2g}"


def _optimizer(line: Line) -> str:
    o = line.arm.optimizer
    return f"{o.kind}, β {o.beta1:g} and {o.beta2:g}, weight decay {o.weight_decay:g}, gradients clipped at {o.clip:g}"


SETTINGS: dict[str, Callable[[Line], str]] = {  # of the paper's rows
    "data": lambda line: f"{line.arm.data.kind}, {line.arm.data.tokenizer}",
    "tokens": lambda line: number(sum(map(tokens_of, line.trials))),
    "schedule": _schedule,
    "peak": lambda line: f"{max(t.optimizer.lr for t in line.trials):.2g}",
    "final": _final,
    "batch": lambda line: f"{line.arm.training.batch:,}",
}
SILENT: dict[str, Callable[[Line], str]] = {  # what else a training run needs to be known
    "Sequence": lambda line: f"{line.arm.training.length:,} tokens",
    "Warm-up": _warmup,
    "Optimizer": _optimizer,
}
MODEL = "Nemotron-3 8B"


@table("mor", "Table 1")
def table_1(results: Results) -> TableResult:
    """Ours from the trials' own configs: those of the BF16 arms."""
    said = paper("mor").table("Table 1")
    places = (ONE, TWO)

    def cells(
        describe: Callable[[Line], str], of_paper: tuple[float | str | None, ...], source: str
    ) -> list[TableCell]:
        return [
            TableCell(_setting(results, where, describe, assumed=value is None), value, source, comparable=False)
            for where, value in zip(places, of_paper, strict=True)
        ]

    rows = [TableRow("Model", tuple(cells(_model, (MODEL, MODEL), said.source)))]
    rows += [
        TableRow(row.title, tuple(cells(SETTINGS[row.id], row.values or row.text, row.source or said.source)), row.unit)
        for row in said.rows
    ]
    rows += [TableRow(title, tuple(cells(describe, (None, None), "lost"))) for title, describe in SILENT.items()]
    rows.append(TableRow("FLOPs of one arm", tuple(cells(_flops, (None, None), "lost"))))
    seeds = len(ids(results, "bf16"))
    return TableResult(
        tuple(column.title for column in said.columns),
        tuple(rows),
        (f"The paper ran each arm once; ours, {seeds} times", "Assumed: what the paper does not state"),
    )


def _model(line: Line) -> str:
    return f"{line.arm.model.name}, {parameters(line.arm.model) / 1e6:,.1f} M parameters"


def _flops(line: Line) -> str:
    return number(float(f"{sum(map(work_of, line.trials)):.2g}"))


def _setting(results: Results, where: Where, describe: Callable[[Line], str], *, assumed: bool) -> Setting | NotRun:
    one = having(results, "bf16", where=where)
    found = [] if one is None else list(ids(one, "bf16", where).values())
    if not found:
        return NotRun(results.scale_name)
    return Setting(describe(Line.of(results, found[0])), tuple(found), assumed)
