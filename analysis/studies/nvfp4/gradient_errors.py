"""Figure B: relative errors that quantization causes in weight gradients (for claim N7).

Trials measure these errors during training (`metrics.gradient_errors`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import family_places, not_planned, sweep_places
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure
from fewbits.analysis.figures.training import model_words
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.nvfp4.metrics import ERROR, gradient_errors
from fewbits.sweeps.planning.store import State

# Labels of the parts of a block, in their order in the block.
PARTS = {"in": "in", "qkv": "QKV", "out": "out", "up": "up", "down": "down"}
PANELS = (  # sweep, arm, title
    ("layers", "nvfp4-base", "{layers} blocks, plain NVFP4"),
    ("recipe", "nvfp4-base", "{layers} blocks, plain NVFP4"),
    ("recipe", "nvfp4", "{layers} blocks, the whole recipe"),
    ("hybrid", "nvfp4", "hybrid, the whole recipe"),
)


@dataclass(frozen=True)
class Errors:
    """Relative errors of an arm's weight gradients at the end of training, means over seeds."""

    title: str
    table: pd.DataFrame  # by part (rows) and block (columns)
    trials: tuple[str, ...]  # ids
    seeds: int  # the number of seeds

    def heat_map(self, most: float, x_label: str) -> HeatMap:
        """Return the heat map of the arm; cells of layers that stay in high precision are empty.

        most: the error with the darkest shade.
        """
        table = self.table.reindex(columns=range(1, 1 + int(self.table.columns.to_numpy()[-1]))).fillna(0.0)
        rows = tuple(HeatRow(label, table.loc[part].to_numpy()) for part, label in PARTS.items() if part in table.index)
        return HeatMap(rows, tuple(map(str, table)), self.title, x_label, most, _in_percent)


def errors_of(results: Results, sweep: str, arm: str, title: str = "") -> Errors | NoData | NotPlanned:
    """Return the mean errors of weight gradients over an arm's finished trials, or the reason why there are none."""
    of, own = family_places(results, arm_table("nvfp4"), sweep), sweep_places(results, sweep)
    if isinstance(own, NotPlanned) or not of.has(arm):
        return not_planned(results)
    trials = of.trials[(of.trials["arm"] == arm) & (of.trials["state"] == State.DONE)]
    rows = gradient_errors(of).merge(trials[["id", "seed"]].drop_duplicates(), on="id")
    if rows.empty:
        return NoData(f"{model_words(own, title)}: no trial of {arm} is done and has measured gradients")
    table = rows.pivot_table(index="part", columns="block", values=ERROR)
    return Errors(model_words(own, title), table, tuple(dict.fromkeys(rows["id"])), rows["seed"].nunique())


@figure("nvfp4", "Figure B", "Where weight gradients err most")
def gradients(results: Results) -> Picture:
    """Draw a heat map for each arm: a cell is a linear layer, its shade the error of the layer's weight gradient."""
    found = [errors_of(results, *panel) for panel in PANELS]
    there = [one for one in found if isinstance(one, Errors)]
    missing = [one for one in found if isinstance(one, NoData)]
    if not there:
        return missing[0] if missing else not_planned(results)
    most = max(float(np.nanmax(one.table.to_numpy(float))) for one in there)

    def draw() -> Figure:
        labels = ["block, from the first" if one is there[-1] else "" for one in there]
        return heat_map_figure([one.heat_map(most, label) for one, label in zip(there, labels, strict=True)])

    seeds = sorted({one.seeds for one in there})
    notes = (
        "Norm of the gradient's change if the operands of a linear layer are quantized, in percent of the gradient's "
        f"norm; last window of training, mean over {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}. "
        "Empty cells: the layer stays in high precision.",
        *(f"{one.reason}." for one in missing),
    )
    return FigureResult(draw, tuple(dict.fromkeys(trial for one in there for trial in one.trials)), notes)


def _in_percent(value: float) -> str:
    return f"{100 * value:.0f}" if value >= 0.0095 else f"{100 * value:.1f}"
