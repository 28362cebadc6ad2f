"""Figure 1: a walk through one block of the model that was trained, with what its runs decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import nn

from fewbits.analysis import plots
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.mor.decisions import at_end, decisions, share
from fewbits.analysis.mor.heat_maps import GRADIENT, INPUT, PARTS, WEIGHT
from fewbits.analysis.mor.looks import (
    chosen,
)
from fewbits.analysis.mor.schematics import BF16_FILL, E4M3, key_of
from fewbits.analysis.plots import SMALL, TEXT
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.experiments.config import load_recipe
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.registry import on_meta

BETWEEN = {"attention": "causal attention", "relu2": "squared ReLU", "gelu": "GELU", "swiglu": "SiLU × gate"}


@dataclass(frozen=True)
class Station:
    """A step of a block, from top to bottom: a linear layer, or what lies between."""

    words: str
    part: str | None = None  # of a linear layer
    shape: str = ""
    joins: bool = False  # the residual stream


@figure("mor", "Figure 1")
def figure_1(results: Results) -> Picture:
    """One transformer block of the model trained, with the errors and decisions of its tensors in the last window."""
    part = chosen(results, "partitions", "1")
    if isinstance(part, NotRun):
        return part
    frame = decisions(part)
    frame = at_end(frame[frame["arm"] == "block"])
    layer = 0
    if not frame.empty:
        shares = share(frame, ["block"])
        layer = int(shares["block"].iloc[shares["value"].argmax()])
    model = results.plan.trials[part.members[0].id].trial.model
    stations = list(walk(model, layer))
    of = frame[frame["block"] == layer]

    def draw() -> Figure:
        step = 25.0
        height = step * len(stations) + 38
        picture, axes = plots.canvas(height / 72)
        key_of(axes, (E4M3, BF16_FILL), height - 14)
        for x, words in zip(CHIPS, ("input x", "weight w", "gradient dy"), strict=True):
            axes.text(x + 34, height - 14, words, ha="center", va="center", fontsize=SMALL, color=plots.theme().quiet)
        above = 0
        for i, station in enumerate(stations):
            y = height - 46 - step * i
            _station(axes, station, y, of, first=i == 0)
            if station.joins:
                _residual(axes, y, y + step * (i - above))
                above = i + 1
        return picture

    recipe = load_recipe("mor/block").fprop.x
    notes = (
        f"Layer {layer + 1} of {model.name}, under {recipe}: mean relative error in E4M3 and, where not every "
        "mini-batch decided alike, the share that stayed in BF16. "
        + ("Last window of Block, the layer that fell back most." if len(of) else "No run has decided anything yet."),
    )
    return FigureResult(draw, tuple(dict.fromkeys(of["id"])), notes)


CHIPS = (184.0, 257.0, 330.0)  # left edges of a linear layer's three tensors


def walk(config: DecoderConfig, layer: int) -> Iterator[Station]:
    """The steps of the model's own block."""
    block = on_meta(config).blocks[layer]
    assert isinstance(block, nn.Module)
    for branch in block.branches:  # type: ignore[union-attr]
        yield Station(type(getattr(block, f"{branch}_norm")).__name__)
        linears = [m for m in getattr(block, branch).modules() if isinstance(m, Linear)]
        for i, linear in enumerate(linears):
            if i == len(linears) - 1:
                yield Station(BETWEEN[branch if branch in BETWEEN else config.activation])
            shape = f"{linear.in_features} → {linear.out_features}"
            yield Station(PARTS[str(linear.part)], str(linear.part), shape)
        yield Station("+", joins=True)


def _station(axes: Axes, station: Station, y: float, frame: pd.DataFrame, *, first: bool) -> None:
    theme = plots.theme()
    left, width = 22.0, 150.0
    if not first:
        axes.add_patch(
            FancyArrowPatch(
                (left + width / 2, y + 17),
                (left + width / 2, y + 9),
                arrowstyle="-|>",
                mutation_scale=6,
                color=theme.quiet,
                linewidth=0.8,
            )
        )
    if station.joins:
        axes.text(left + width / 2, y, "⊕", ha="center", va="center", fontsize=TEXT + 3)
        return
    edge = theme.text if station.part else theme.grid
    axes.add_patch(Rectangle((left, y - 9), width, 18, facecolor="none", edgecolor=edge, linewidth=0.9))
    if station.part is None:
        axes.text(left + width / 2, y, station.words, ha="center", va="center", fontsize=SMALL, color=theme.quiet)
        return
    axes.text(left + 6, y, station.words, va="center", fontsize=SMALL, weight="bold")
    axes.text(left + width - 6, y, station.shape, va="center", ha="right", fontsize=SMALL)
    for x, kind in zip(CHIPS, (INPUT, WEIGHT, GRADIENT), strict=True):
        rows = frame[(frame["part"] == station.part) & (frame["slot"] == kind.slot)]
        _decided(axes, x, y, rows)


def _residual(axes: Axes, below: float, above: float) -> None:
    """The way around a branch: from above its norm to where its output is added."""
    middle = 97.0
    axes.plot(
        [middle, 8, 8, middle - 6], [above + 13, above + 13, below, below], color=plots.theme().quiet, linewidth=0.8
    )


def _decided(axes: Axes, x: float, y: float, rows: pd.DataFrame) -> None:
    """A tensor's error, on the colour of what most mini-batches took."""
    theme = plots.theme()
    if rows.empty:
        axes.add_patch(Rectangle((x, y - 9), 68, 18, facecolor="none", edgecolor=theme.grid, linewidth=0.9))
        return
    error = float(np.average(rows["error"], weights=rows["batches"]))
    fallback = float(np.average(rows["fallback"], weights=rows["batches"]))
    fill = theme.formats[BF16_FILL if fallback > 0.5 else E4M3]
    axes.add_patch(Rectangle((x, y - 9), 68, 18, facecolor=fill, linewidth=0))
    if 0 < fallback < 1:
        both = min(0.5, fallback) if fallback <= 0.5 else 1 - fallback
        other = theme.formats[E4M3 if fallback > 0.5 else BF16_FILL]
        axes.add_patch(Rectangle((x + 68 * (1 - both), y - 9), 68 * both, 18, facecolor=other, linewidth=0))
    words = f"{100 * error:.2f} %" + (f" · {100 * fallback:.0f} %" if 0 < fallback < 1 else "")
    axes.text(x + 34, y, words, ha="center", va="center", fontsize=SMALL)
