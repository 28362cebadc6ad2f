"""Figures of training: for each metric a panel of the arms' curves and a panel of their paired changes from a baseline.

The changes have their own panel because arms differ by only a tenth of a percent. Hollow marks show the paper's changes
at the end of its training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import AGAIN, BASELINE, ArmTable, arm_table, not_planned, sweep_places
from fewbits.analysis.figures import series
from fewbits.analysis.figures.panels import Line, Panel, PaperMark, Rule, curve_figure
from fewbits.analysis.figures.series import METRICS, Metric, Series
from fewbits.analysis.figures.theme import BASELINE as BASELINE_STYLE
from fewbits.analysis.figures.theme import NOISE, QUIET, STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.common.from_dict import one_of
from fewbits.common.wording import amount
from fewbits.sweeps.planning.cost import parameters_of


@dataclass(frozen=True)
class ArmCurves:
    """Arms of one sweep and their baseline, as figures.yaml declares them; each metric gives a row of panels."""

    sweep: str
    arms: tuple[str, ...]
    baseline: str = BASELINE
    name: str = ""  # the label of the rows, if a figure has rows of several sweeps (see `model_words`)
    metrics: tuple[str, ...] = ("loss", "validation_loss")
    where: dict[str, str] = field(default_factory=dict)  # selected values of the sweep's axes
    labels: dict[str, str] = field(default_factory=dict)  # by arm, labels that replace those of arms.yaml
    table: str = ""  # the id of the paper's table that has the arms' numbers at the end of training
    paper: dict[str, str] = field(default_factory=dict)  # by arm, the key of the paper's number for its final change
    # Whether to show the A/A comparison. It has the optimizer and learning rate of plain BF16; do not show it beside
    # arms with another optimizer or learning rate.
    noise: bool = True

    def __post_init__(self) -> None:
        for metric in self.metrics:
            one_of(f"metric of {self.sweep}", metric, METRICS)

    @property
    def all_arms(self) -> tuple[str, ...]:
        return (self.baseline, *self.arms)

    def label(self, table: ArmTable, arm: str) -> str:
        return self.labels.get(arm, table.label(arm))

    def paper_change(self, table: ArmTable, metric: str, arm: str) -> float | None:
        """Return the paper's final change of an arm from its baseline as a fraction; None if the paper has none."""
        if metric not in ("loss", "validation_loss"):
            return None
        if arm in self.paper:
            return paper(table.study).numbers[self.paper[arm]].value
        if not self.table:
            return None
        column = table.column(self.table, arm, table.place(self.where))
        return paper(table.study).table(self.table).change(metric, column)


@dataclass(frozen=True)
class TrainingFigure:
    """A figure of training, as figures.yaml declares it."""

    id: str
    rows: tuple[ArmCurves, ...]
    notes: tuple[str, ...] = ()
    title: str | None = None  # given only for a figure that the paper does not have
    # Whether each entry of `rows` has two rows of three panels: the first two metrics and the end of the second, then
    # the changes of all three metrics.
    zoom: bool = False


def model_words(part: Results, text: str) -> str:
    """Return the text with {layers} and {size} replaced by the blocks and parameters of the sweep's first model."""
    if "{" not in text:
        return text
    model = part.plan.trials[part.members[0].id].trial.model
    return text.format(layers=model.layers, size=amount(parameters_of(model)).replace(" ", ""))


@dataclass(frozen=True)
class Shown:
    """One row of panels: the results of arms of one sweep for one metric."""

    part: Results  # the results of the sweep
    of: ArmCurves
    metric: Metric
    table: ArmTable
    styles: Mapping[str, Style]  # by the arms' labels
    again: Results | None = None  # the results with the A/A trials; None if they are not shown

    @property
    def name(self) -> str:
        return model_words(self.part, self.of.name)

    def label(self, arm: str) -> str:
        return self.of.label(self.table, arm)

    @cached_property
    def levels(self) -> dict[str, Series]:
        """The curves of the metric's values for the arms and their trunks, by arm; arms without data are left out."""
        frame = series.recorded(self.part, self.metric)
        found = {name: series.level(frame, name) for name in (*self.of.all_arms, *self.trunks)}
        return {name: one for name, one in found.items() if one is not None}

    @cached_property
    def changes(self) -> dict[str, Series]:
        """The curves of the arms' changes from the baseline, of A/A from BF16, and of later trunks from the first."""
        frame = series.recorded(self.part, self.metric)
        changes = {arm: series.change(frame, arm, self.of.baseline) for arm in self.of.arms}
        # An archive keeps means over steps, more of them for a longer trunk, so training losses cannot be paired.
        for trunk in self.trunks[1:] if not self.metric.every_step else ():
            changes[trunk] = series.change(frame, trunk, self.trunks[0])
        if self.again is not None and not self.metric.of_micro_batches:
            changes[AGAIN] = series.change(series.recorded(self.again, self.metric), AGAIN, BASELINE)
        return {name: one for name, one in changes.items() if one is not None}

    @cached_property
    def trunks(self) -> tuple[str, ...]:
        parents = {self.part.plan.trials[m.id].parent for m in self.part.members if m.cell.arm in self.of.all_arms}
        found = {m.cell.arm for m in self.part.members if m.id in parents}
        return tuple(name for name in self.table.trunks if name in found)

    @property
    def drawn(self) -> tuple[str, ...]:
        """The arms that have data, including the baseline but not trunks."""
        return tuple(arm for arm in self.of.all_arms if arm in self.levels)

    @property
    def trials(self) -> tuple[str, ...]:
        found = (one.trials for one in (*self.levels.values(), *self.changes.values()))
        return tuple(dict.fromkeys(trial for some in found for trial in some))

    @property
    def paper_changes(self) -> dict[str, float]:
        changes = {arm: self.of.paper_change(self.table, self.metric.name, arm) for arm in self.of.arms}
        return {arm: value for arm, value in changes.items() if value is not None}

    def style(self, arm: str) -> Style:
        if arm == BASELINE != self.of.baseline:  # plain BF16 beside a baseline with another learning rate
            return Style("text", (4, 2))
        return BASELINE_STYLE if arm == self.of.baseline else self.styles[self.label(arm)]

    def level_panel(self, x_label: str = "tokens") -> Panel:
        ends = [float(self.levels[name].tokens[-1]) for name in self.trunks if name in self.levels]
        return Panel(
            f"{self.metric.title}, {self.metric.unit}",
            (*self._trunks(self.levels), *self.lines(self.levels)),
            x_label=x_label,
            y_label=self.name,
            x_axis="tokens",
            branches_at=max(ends, default=None),
        )

    def change_panel(self, x_label: str = "tokens", title: str = "", y_label: str = "") -> Panel:
        """Return the panel of our and the paper's changes of the arms from the baseline."""
        lines = self._trunks(self.changes)
        if AGAIN in self.changes:
            lines.append(self._line(self.changes[AGAIN], NOISE, self.table.label(AGAIN), secondary=True))
        switches = series.switches(self.part, self.of.arms)
        return Panel(
            title or f"Change from {self.label(self.of.baseline)}, %",
            (*lines, *self.lines(self.changes)),
            (Rule(0, "text"), *(Rule(tokens, "line", upright=True, dashes=(1.5, 1.5)) for tokens in switches)),
            tuple(PaperMark(value, self.style(arm)) for arm, value in self.paper_changes.items()),
            x_label=x_label,
            y_label=y_label,
            x_axis="tokens",
            y_axis="change",
            empty="" if self.changes else "no pair of trials",
        )

    def lines(self, found: Mapping[str, Series]) -> list[Line]:
        arms = (arm for arm in self.of.all_arms if arm in found)
        return [self._line(found[arm], self.style(arm), self.label(arm)) for arm in arms]

    def _trunks(self, found: Mapping[str, Series]) -> list[Line]:
        """Return the lines of the trunks. A trunk has the same style in all rows of a figure."""
        styles = {name: Style("quiet", (4, 2)) if i else QUIET for i, name in enumerate(self.table.trunks)}
        trunks = (name for name in self.trunks if name in found)
        return [self._line(found[name], styles[name], self.table.trunks[name], secondary=True) for name in trunks]

    def _line(self, found: Series, style: Style, label: str, *, secondary: bool = False) -> Line:
        # If a curve has many points, there is no room to draw points of several curves side by side.
        apart = not self.metric.dense and style.colour != "quiet"
        points = False if self.metric.moving else None
        return Line(found.tokens, found.mean, style, label, found.band, points, apart, secondary)


def training_figure(results: Results, study: str, of: TrainingFigure) -> Picture:
    """Return the figure with the rows whose arms are run at this scale, or the reason why there is none."""
    shown = show_rows(results, study, of.rows)
    if not shown:
        return not_planned(results)
    if not any(row.drawn for row in shown):
        labels = dict.fromkeys(row.label(arm) for row in shown for arm in row.of.all_arms)
        return NoData(f"no curve of {', '.join(labels)}, since no trial has recorded one yet")

    def draw() -> Figure:
        if of.zoom:
            return curve_figure(zoomed_panels(shown))
        return curve_figure(panels_of(shown), sharex="col" if len({id(row.part) for row in shown}) == 1 else "none")

    return FigureResult(draw, trials_of(shown), (*notes_of(shown, of.zoom), *of.notes, *left_out(results, of.rows)))


def show_rows(results: Results, study: str, rows: Sequence[ArmCurves]) -> list[Shown]:
    """Return a row of panels for each entry and metric; entries whose arms are not run at this scale are left out."""
    table, found = arm_table(study), []
    styles = assign_styles(table, rows)
    for row in rows:
        part = planned_row(results, row)
        if part is not None:
            # The A/A trials are those of the first sweep of the family that has some.
            family = table.family(row.sweep) if row.noise else ()
            parts = (sweep_places(results, sweep, row.where) for sweep in family)
            again = next((one for one in parts if isinstance(one, Results) and one.has(AGAIN)), None)
            found += [Shown(part, row, METRICS[metric], table, styles, again) for metric in row.metrics]
    return found


def planned_row(results: Results, row: ArmCurves) -> Results | None:
    """Return the results of the row's sweep; None if this scale lacks the baseline or all of the row's arms."""
    part = sweep_places(results, row.sweep, row.where)
    if isinstance(part, NotPlanned) or not part.has(row.baseline):
        return None
    return part if any(map(part.has, row.arms)) else None


def panels_of(shown: Sequence[Shown]) -> list[list[Panel]]:
    """Return the two panels of each row. If all rows show the same trials, only the last row labels the x axis."""
    last = shown[-1]
    labels = ["" if row is not last and all(one.part is last.part for one in shown) else "tokens" for row in shown]
    return [[row.level_panel(label), row.change_panel(label)] for row, label in zip(shown, labels, strict=True)]


def zoomed_panels(shown: Sequence[Shown]) -> list[list[Panel]]:
    """Return two rows of panels for each of the figure's entries, as `TrainingFigure.zoom` describes them."""
    rows: list[list[Panel]] = []
    for of in dict.fromkeys(id(row.of) for row in shown):
        each = [row for row in shown if id(row.of) == of]
        levels = [replace(row.level_panel(""), title=row.metric.title) for row in each[:2]]
        rows.append([levels[0], *(replace(one, y_label="") for one in (levels[1], _end_of(levels[1])))])
        rows.append([row.change_panel(title=f"Δ {row.metric.title.partition(' ')[0].lower()}, %") for row in each])
    return rows


def _end_of(panel: Panel) -> Panel:
    """Return the panel with the last fifth of its x axis; of arms that branch from a trunk, of the branches."""
    ends = [float(line.x[-1]) for line in panel.lines]
    begin = min(float(line.x[0]) for line in panel.lines) if panel.branches_at is None else panel.branches_at
    left = max(ends) - (max(ends) - begin) / 5
    lines = []
    for line in panel.lines:
        kept = line.x >= left
        band = line.band and (line.band[0][kept], line.band[1][kept])
        lines += [replace(line, x=line.x[kept], y=line.y[kept], band=band)] if kept.any() else []
    title = f"{panel.title.partition(' ')[0]}, end"
    return replace(panel, title=title, lines=tuple(lines), branches_at=None, x_ticks=2)


def assign_styles(table: ArmTable, rows: Sequence[ArmCurves]) -> dict[str, Style]:
    """Return a style for each label of the figure's arms: the one in arms.yaml, else the next unused one."""
    labels = {row.label(table, arm): table.arm(arm).style for row in rows for arm in row.arms if arm != BASELINE}
    free = iter(i for i in range(len(STYLES)) if i not in labels.values())
    if len(labels) > len(STYLES):
        raise ValueError(f"a figure has {len(labels)} arms, but at most {len(STYLES)} have styles: use several figures")
    return {label: STYLES[next(free) if place is None else place] for label, place in labels.items()}


def trials_of(shown: Sequence[Shown]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(trial for row in shown for trial in row.trials))


def notes_of(shown: Sequence[Shown], zoom: bool = False) -> tuple[str, ...]:
    """Return notes: first what lines and bands show, then which seeds diverged, and which arms have no data."""
    ids = set(trials_of(shown))
    seeds = {member.cell.seed for row in shown for member in row.part.members if member.id in ids}
    levels, changes = ("Upper rows", "Lower rows (Δ)") if zoom else ("Left", "Right")
    notes = [f"One seed, so there is neither a range nor an interval. {changes}: paired changes."]
    if len(seeds) > 1:
        notes = [f"{levels}: mean and range of seeds. {changes}: mean of the paired changes and its 90 % interval."]
    if any(row.metric.every_step for row in shown):
        notes.append(f"The training loss is averaged over steps to {series.POINTS} points of each curve.")
    if any(row.metric.moving for row in shown):
        notes.append("Average and maximum losses, in nats, are moving averages over steps, with α = 1/16 and 1/128.")
    if any(row.paper_changes for row in shown):
        notes.append("The paper's final numbers are hollow marks at the right, or arrows if they are far from ours.")
    for row in shown:
        beside = f"{row.name}: " if row.name else ""
        there = {arm for other in shown if other.of is row.of for arm in other.drawn}
        missing = [arm for arm in row.of.all_arms if arm not in there]
        gone = [beside + note for note in series.diverged(row.part, row.of.all_arms)]
        for planned, reason in ((True, "No data for"), (False, "Not run at this scale:")):
            if labels := [row.label(arm) for arm in missing if row.part.has(arm) == planned]:
                gone.append(f"{beside}{reason} {', '.join(labels)}.")
        notes += gone
    return tuple(dict.fromkeys(notes))


def left_out(results: Results, rows: Sequence[ArmCurves]) -> tuple[str, ...]:
    """Return one note that names the rows whose arms are not run at this scale; without such rows, ()."""
    missing = [row for row in rows if planned_row(results, row) is None]
    names = dict.fromkeys(row.sweep if not row.name or "{" in row.name else row.name for row in missing)
    return (f"Not run at this scale: {'; '.join(names)}.",) if missing else ()
