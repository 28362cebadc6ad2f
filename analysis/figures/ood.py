"""Figures of losses on out-of-domain text, which replace the paper's figures of task scores.

The scores that the study's paper reports for the end of training are shown beside our losses. Task scores need models
of billions of parameters. Out-of-domain losses of small models answer a part of the question that task scores answer:
if an arm is as good as its baseline on text like the training data, is it also as good on other text?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import not_planned
from fewbits.analysis.figures.bars import Estimate, draw_estimates
from fewbits.analysis.figures.curves import ROW, draw_panel, keys
from fewbits.analysis.figures.panels import legend, panels, paper_key, placeholder
from fewbits.analysis.figures.training import ArmCurves, Shown, left_out, notes_of, show_rows, trials_of
from fewbits.analysis.report.items import FigureResult, Picture


@dataclass(frozen=True)
class OodFigure:
    """A figure with a row of panels for each group of arms, as figures.yaml declares it.

    The panels show the out-of-domain loss and the paper's final score.
    """

    id: str
    score: str  # the name of the paper's score in titles, such as MMLU
    row: str  # the id of the score's row in the paper's tables
    rows: tuple[ArmCurves, ...]
    notes: tuple[str, ...] = field(default=())


def ood_figure(results: Results, study: str, of: OodFigure) -> Picture:
    """Return the figure that `of` declares, with a row of panels for each group of arms.

    If this scale does not run the arms of a row, the row's panels say so. Return NotPlanned if no row is run at this
    scale, and NoData if no trial has recorded the out-of-domain loss.
    """
    shown = {row.of.name: row for row in show_rows(results, study, of.rows)}
    if not shown:
        return not_planned(results)
    if not any(row.drawn for row in shown.values()):
        return NoData("no curve of out-of-domain loss, since no trial has recorded this loss yet")
    scores = {row.name: _scores(study, of, row) for row in of.rows}

    def draw() -> Figure:
        figure, grid = panels(len(of.rows), 2, 0.6 + ROW * len(of.rows))
        drawn: list[Mapping[str, float]] = []
        for axes, row in zip(grid, of.rows, strict=True):
            if row.name not in shown:
                for one in axes:
                    placeholder(one, not_planned(results).reason)
                continue
            ours = shown[row.name]
            title = f"Out-of-domain loss, from {row.label(ours.table, row.baseline)}, %"
            draw_panel(axes[0], ours.change_panel(title=title, y_label=row.name))
            if scores[row.name] in drawn:  # a row above shows the same numbers
                axes[-1].set_axis_off()
                continue
            drawn.append(scores[row.name])
            printed = [_printed(ours, arm, scores[row.name]) for arm in row.all_arms]
            draw_estimates(axes[-1], f"{of.score}, the paper's, %", printed)
        entries = keys([row.change_panel() for row in shown.values()])
        legend(figure, [*entries, paper_key()])
        return figure

    note = f"{of.score} needs models of billions of parameters; the loss on out-of-domain text replaces it."
    notes = (note, *notes_of(list(shown.values()))[1:], *of.notes, *left_out(results, of.rows))
    return FigureResult(draw, trials_of(list(shown.values())), notes)


def _scores(study: str, of: OodFigure, row: ArmCurves) -> dict[str, float]:
    """Return the paper's final scores of a row's arms as fractions, by arm; arms without a score are left out."""
    table, printed = arm_table(study), paper(study).table(row.table)
    values = {arm: printed.value(of.row, table.column(printed.id, arm, table.place(row.where))) for arm in row.all_arms}
    return {arm: value / 100 for arm, value in values.items() if value is not None}


def _printed(row: Shown, arm: str, scores: Mapping[str, float]) -> Estimate:
    return Estimate(row.of.label(row.table, arm), None, paper=scores.get(arm), style=row.style(arm))
