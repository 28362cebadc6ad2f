"""Relative errors that quantization causes in weight gradients, as a table and as Figure B (for claim N7).

Trials measure these errors during training (`metrics.gradient_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import family_places, not_planned
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import figure, table
from fewbits.analysis.studies.nvfp4.metrics import ERROR, errors_by_block, gradient_errors
from fewbits.analysis.tables.cells import PERCENT, cell
from fewbits.analysis.tables.comparing import own_numbers
from fewbits.sweeps.planning.store import State

PARTS = {
    "in": "in",
    "qkv": "QKV",
    "out": "out",
    "up": "up",
    "down": "down",
}  # labels of parts, in their order in a block
# The columns of the table: by title, the part of a block; None: all parts.
KINDS = {"All": None, "QKV": "qkv", "Projection": "out", "FC1": "up", "FC2": "down"}


@table("nvfp4", "Gradient errors", "Relative error of weight gradients by block in plain NVFP4, 20 blocks (N7)")
def errors_table(results: Results) -> Table:
    """Return a table of mean errors of weight gradients by block of the model (rows) and kind of layer (columns)."""
    of, arm = family_places(results, arm_table("nvfp4"), "layers"), "nvfp4-base"
    if not of.has(arm):
        return not_planned(results)
    found = {title: errors_by_block(of, kind) for title, kind in KINDS.items()}
    count = max((block for trial in found["All"].values() for block in trial), default=0)

    def error(by_trial: Mapping[str, Mapping[int, float]], block: int) -> TableCell:
        numbers = {trial: blocks[block] for trial, blocks in by_trial.items() if block in blocks}
        return cell(own_numbers(of, numbers, arm), PERCENT)

    rows = tuple(
        TableRow(f"Block {block}", tuple(error(by_trial, block) for by_trial in found.values()), "%")
        for block in range(1, count + 1)
    )
    notes = ("The norm of the gradient's change if one layer's operands are quantized, over the norm of the gradient",)
    return TableResult(tuple(KINDS), rows, notes)


# -------------------------------------------------------------------------------- Figure B


@dataclass(frozen=True)
class Shown:
    """An arm of a sweep with the title of its panel."""

    sweep: str
    arm: str
    title: str


PANELS = (
    Shown("layers", "nvfp4-base", "20 blocks, plain NVFP4"),
    Shown("recipe", "nvfp4-base", "6 blocks, plain NVFP4"),
    Shown("recipe", "nvfp4", "6 blocks, the whole recipe"),
    Shown("hybrid", "nvfp4", "hybrid, the whole recipe"),
)


@dataclass(frozen=True)
class Errors:
    """Relative errors of an arm's weight gradients at the end of training, means over seeds."""

    of: Mapping[tuple[str, int], float]  # by (part, block)
    trials: tuple[str, ...]  # ids
    seeds: int  # the number of seeds

    @property
    def parts(self) -> list[str]:
        return [name for name in PARTS if name in {name for name, _ in self.of}]

    @property
    def blocks(self) -> list[int]:
        return list(range(1, 1 + max(block for _, block in self.of)))

    def heat_map(self, title: str, most: float, x_label: str) -> HeatMap:
        """Return the heat map of the arm; cells of layers that stay in high precision are empty.

        most: the error with the darkest shade.
        """
        rows = (
            HeatRow(PARTS[part], np.array([self.of.get((part, block), 0.0) for block in self.blocks]))
            for part in self.parts
        )
        return HeatMap(tuple(rows), tuple(map(str, self.blocks)), title, x_label, most, _in_percent)


def errors_of(results: Results, shown: Shown) -> Errors | NoData | NotPlanned:
    """Return the mean errors of weight gradients over an arm's finished trials, or the reason why there are none."""
    of = family_places(results, arm_table("nvfp4"), shown.sweep)
    if not of.has(shown.arm):
        return not_planned(results)
    trials = of.trials[(of.trials["arm"] == shown.arm) & (of.trials["state"] == State.DONE)]
    rows = gradient_errors(of)
    rows = rows[rows["id"].isin(trials["id"])]
    if rows.empty:
        return NoData(f"no trial of {shown.arm} is done and has measured gradients")
    means = rows.groupby(["part", "block"], as_index=False)[ERROR].mean()
    places = zip(means["part"].astype(str), means["block"].astype(int), strict=True)
    found = dict(zip(places, means[ERROR].astype(float), strict=True))
    return Errors(found, tuple(dict.fromkeys(rows["id"])), trials.loc[trials["id"].isin(rows["id"]), "seed"].nunique())


@figure("nvfp4", "Figure B", "Where weight gradients err most")
def gradients(results: Results) -> Picture:
    """Draw a heat map for each arm: a cell is a linear layer, its shade the error of the layer's weight gradient."""
    found = {shown: errors_of(results, shown) for shown in PANELS}
    there = {shown: one for shown, one in found.items() if isinstance(one, Errors)}
    if not there:
        return next((one for one in found.values() if isinstance(one, NoData)), not_planned(results))
    most = max(value for one in there.values() for value in one.of.values())

    def draw() -> Figure:
        last = list(there)[-1]
        labels = {shown: "block, from the first" if shown is last else "" for shown in there}
        return heat_map_figure([one.heat_map(shown.title, most, labels[shown]) for shown, one in there.items()])

    seeds = sorted({one.seeds for one in there.values()})
    notes: tuple[str, ...] = (
        "Norm of the gradient's change if the operands of a linear layer are quantized, in percent of the gradient's "
        f"norm; last window of training, mean over {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}. "
        "Empty cells: the layer stays in high precision.",
    )
    notes += tuple(f"{shown.title}: {one.reason}." for shown, one in found.items() if isinstance(one, NoData))
    return FigureResult(draw, tuple(dict.fromkeys(trial for one in there.values() for trial in one.trials)), notes)


def _in_percent(value: float) -> str:
    return f"{100 * value:.0f}" if value >= 0.0095 else f"{100 * value:.1f}"
