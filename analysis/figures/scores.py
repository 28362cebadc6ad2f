"""Figures of scores over training, such as MMLU: our scores where runs have stored them, and the paper's last ones.

`fewbits evaluate` and `evaluation.tasks_every` store scores of checkpoints. Models for CPUs cannot answer questions.
Where no run has a score, a panel with the loss on other text replaces it, which answers a part of the question: if an
arm is as good as its baseline on text like the training data, is it also as good on text of another kind?
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.evaluations import letters, scores_over_training
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import ArmTable, arm_table, not_planned
from fewbits.analysis.figures import series
from fewbits.analysis.figures.panels import Line, Panel, PaperMark, curve_figure
from fewbits.analysis.figures.series import Series
from fewbits.analysis.figures.theme import BASELINE, Style
from fewbits.analysis.figures.training import (
    ArmCurves,
    Shown,
    assign_styles,
    left_out,
    notes_of,
    planned_row,
    show_rows,
    trials_of,
)
from fewbits.analysis.report.items import FigureResult, Picture

STAND_IN = "Without stored scores, the loss on text of another kind stands in for them."


@dataclass(frozen=True)
class ScoresFigure:
    """A figure of scores, as figures.yaml declares it: a panel for each row of arms and each score."""

    id: str
    scores: tuple[str, ...]  # titles of tasks in the paper
    rows: tuple[ArmCurves, ...]
    instead: tuple[ArmCurves, ...] = ()  # other arms whose loss on other text is shown if no run of `rows` has scores


def scores_figure(results: Results, study: str, of: ScoresFigure) -> Picture:
    """Return the figure, or why there is none; with `of.instead`, the paper's scores are always shown."""
    ours = [_curves(results, row, of) for row in of.rows]
    bare = [row for row, curves in zip(of.rows, ours, strict=True) if not any(curves.values())]
    bare = list(of.instead) if of.instead and len(bare) == len(of.rows) else bare
    planned = show_rows(results, study, [replace(row, metrics=("ood_loss",)) for row in bare])
    stand_ins = [row for row in planned if row.drawn]
    if len(bare) == len(of.instead or of.rows) and not stand_ins:
        missing = NoData("no run has stored scores or recorded the loss on other text")
        return missing if planned else not_planned(results)
    table, styles = arm_table(study), assign_styles(arm_table(study), (*of.rows, *of.instead))

    def draw() -> Figure:
        shown = [_stand_in(one) for one in stand_ins] if of.instead else []
        for row, curves in zip(of.rows, ours, strict=True):
            if of.instead or planned_row(results, row) is not None:
                own = () if of.instead else stand_ins
                shown += [_stand_in(one) for one in own if one.of.name == row.name]
                shown += [_panel(table, styles, row, name, curves[name]) for name in of.scores]
        return curve_figure([shown[i : i + 2] for i in range(0, len(shown), 2)])

    trials = [trial for curves in ours for arms in curves.values() for one in arms.values() for trial in one.trials]
    notes = ((STAND_IN,) if stand_ins else (), notes_of(stand_ins)[1:], left_out(results, of.rows))
    return FigureResult(draw, tuple(dict.fromkeys((*trials, *trials_of(stand_ins)))), tuple(chain(*notes)))


def _curves(results: Results, row: ArmCurves, of: ScoresFigure) -> dict[str, dict[str, Series]]:
    """Return {title of a task: {arm: its score over training}} for the row's arms; arms without scores are left out."""
    part = planned_row(results, row)
    if part is None:
        return {name: {} for name in of.scores}
    frames = {name: scores_over_training(part, name) for name in of.scores}
    levels = {name: {arm: series.level(frame, arm) for arm in row.all_arms} for name, frame in frames.items()}
    return {name: {arm: one for arm, one in arms.items() if one is not None} for name, arms in levels.items()}


def _stand_in(row: Shown) -> Panel:
    return row.change_panel(title=f"Other text, from {row.label(row.of.baseline)}, %", y_label=row.name)


def _panel(table: ArmTable, styles: dict[str, Style], row: ArmCurves, name: str, curves: dict[str, Series]) -> Panel:
    """Return the panel of one score: our curves with the paper's last scores or, without curves, these scores alone."""
    said = paper(table.study).table(row.table)
    of = next((one for one in said.rows if letters(one.title) == letters(name)), None)
    labels = {arm: row.label(table, arm) for arm in row.all_arms}
    style = {arm: BASELINE if arm == row.baseline else styles[labels[arm]] for arm in row.all_arms}
    columns = {arm: table.column(said.id, arm, table.place(row.where)) for arm in row.all_arms}
    last = {arm: None if of is None else said.value(of.id, column) for arm, column in columns.items()}
    known = {arm: value / 100 for arm, value in last.items() if value is not None}
    if curves:
        lines = [Line(one.tokens, one.mean, style[arm], labels[arm], one.band) for arm, one in curves.items()]
        marks = tuple(PaperMark(value, style[arm]) for arm, value in known.items())
        return Panel(f"{name}, %", tuple(lines), (), marks, "tokens", row.name, x_axis="tokens", y_axis="percent")
    points = tuple(
        Line(np.array([float(i)]), np.array([value]), style[arm], labels[arm], hollow=True)
        for i, (arm, value) in enumerate(known.items())
    )
    missing = "" if points else "the paper prints no last score"
    return Panel(f"{name}, paper, %", points, y_label=row.name, x_axis="none", y_axis="percent", empty=missing)
