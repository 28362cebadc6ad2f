"""Draw Figure 1: one block of the trained Transformer, with the format that the arm Block chose for each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import sweep_places
from fewbits.analysis.figures.drawing import BF16, E4M3, TEXT, Drawing
from fewbits.analysis.figures.theme import theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.heat_maps import GRADIENT, INPUT, WEIGHT
from fewbits.analysis.studies.mor.tensors import ONE, TITLES, decisions, share
from fewbits.experiments.config import load_recipe
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.registry import on_meta
from fewbits.sweeps.planning.store import State

# The label of the operation before the last linear layer of a block's branch (attention or feed-forward network), by
# the branch's name or, for a feed-forward network, by its activation.
BETWEEN = {"attention": "causal attention", "relu2": "squared ReLU", "gelu": "GELU", "swiglu": "SiLU × gate"}
# The left edge of each column of tensors in points, its heading, and the tensor.
TENSORS = ((184.0, "input x", INPUT), (257.0, "weight w", WEIGHT), (330.0, "gradient dy", GRADIENT))
HEIGHT = 25.0  # the height of a step's row in points
LEFT, WIDTH = 22.0, 150.0  # the left edge and the width of the boxes of steps
CHIP = 68.0  # the width of a tensor's box


@dataclass(frozen=True)
class Step:
    """A step of a transformer block as the figure shows it: a linear layer or another operation."""

    words: str  # the label
    part: str | None = None  # for a linear layer only: the name of the part, such as qkv
    shape: str = ""  # for a linear layer only, for example "64 → 192"
    joins: bool = False  # whether the step adds the output of attention or FFN to the residual stream


@figure("mor", "Figure 1")
def figure_1(results: Results) -> Picture:
    """Draw the Transformer block with the largest share of fallbacks, with the error and decision of each tensor.

    The numbers are from the last window of steps of the finished trials of the arm Block. If there are none, the first
    block is drawn without numbers.
    """
    part = sweep_places(results, "partitions", ONE)
    if isinstance(part, NotPlanned):
        return part
    frame = decisions(part)
    frame = last_windows(frame[(frame["arm"] == "block") & (frame["state"] == State.DONE)])
    block = 0
    if not frame.empty:
        shares = share(frame, ["block"])
        block = int(shares["block"].iloc[shares["value"].argmax()])
    model = results.plan.trials[part.members[0].id].trial.model
    steps = list(block_steps(model, block))
    of = frame[frame["block"] == block]

    def draw() -> Figure:
        drawing = Drawing(HEIGHT * len(steps) + 38)
        top = drawing.height - 14
        drawing.format_key((E4M3, BF16), top)
        for x, words, _ in TENSORS:
            drawing.text(x + CHIP / 2, top, words, at="center", quiet=True)
        branch = 0
        for i, step in enumerate(steps):
            y = drawing.height - 46 - HEIGHT * i
            _draw_step(drawing, step, y, of, first=i == 0)
            if step.joins:  # draw the residual stream: a line from above the branch's norm to the addition
                start = y + HEIGHT * (i - branch) + 13
                drawing.line([LEFT + WIDTH / 2, 8, 8, LEFT + WIDTH / 2 - 6], [start, start, y, y])
                branch = i + 1
        return drawing.figure

    recipe = load_recipe("mor/block").fprop.x
    notes = (
        f"Layer {block + 1} of {model.name} with {recipe}: mean relative error in E4M3 and, if the decisions in "
        "mini-batches differ, the share of mini-batches in which the tensor stayed in BF16. "
        + (
            "Last window of Block; the layer with most fallbacks."
            if len(of)
            else "No finished run has recorded decisions."
        ),
    )
    return FigureResult(draw, tuple(dict.fromkeys(of["id"])), notes)


def block_steps(config: DecoderConfig, block: int) -> Iterator[Step]:
    """Yield the steps of one block of this model, from top to bottom. block: its index."""
    module = on_meta(config).blocks[block]
    assert isinstance(module, nn.Module)
    for branch in module.branches:  # type: ignore[union-attr]
        yield Step(type(getattr(module, f"{branch}_norm")).__name__)
        linears = [m for m in getattr(module, branch).modules() if isinstance(m, Linear)]
        for i, linear in enumerate(linears):
            if i == len(linears) - 1:
                yield Step(BETWEEN[branch if branch in BETWEEN else config.activation])
            shape = f"{linear.in_features} → {linear.out_features}"
            yield Step(TITLES[str(linear.part)], str(linear.part), shape)
        yield Step("+", joins=True)


def _draw_step(drawing: Drawing, step: Step, y: float, frame: pd.DataFrame, *, first: bool) -> None:
    middle = LEFT + WIDTH / 2
    if not first:
        drawing.arrow((middle, y + 17), (middle, y + 9))
    if step.joins:
        drawing.text(middle, y, "⊕", at="center", size=TEXT + 3)
    elif step.part is None:
        drawing.box(LEFT, y - 9, WIDTH, 18, step.words, edge="grid", quiet=True)
    else:
        drawing.box(LEFT, y - 9, WIDTH, 18, edge="text")
        drawing.text(LEFT + 6, y, step.words, bold=True)
        drawing.text(LEFT + WIDTH - 6, y, step.shape, at="right")
        for x, _, kind in TENSORS:
            _draw_decision(drawing, x, y, frame[(frame["part"] == step.part) & (frame["slot"] == kind.slot)])


def _draw_decision(drawing: Drawing, x: float, y: float, rows: pd.DataFrame) -> None:
    """Draw the box of a tensor, with its left edge at x, its middle at height y, and the tensor's mean relative error.

    The colours of the box show in which share of the mini-batches the tensor was quantized to E4M3, and in which share
    it stayed in BF16. If both shares are above 0, the box also has the share of BF16 as text.

    rows: the tensor's rows of the table `tensors.decisions`; without rows, the box is empty.
    """
    if rows.empty:
        drawing.box(x, y - 9, CHIP, 18, edge="grid")
        return
    error = float(np.average(rows["error"], weights=rows["batches"]))
    fallback = float(np.average(rows["fallback"], weights=rows["batches"]))
    most, other = (BF16, E4M3) if fallback > 0.5 else (E4M3, BF16)
    rest = min(fallback, 1 - fallback)
    drawing.box(x, y - 9, CHIP, 18, fill=theme().formats[most])
    if rest > 0:
        drawing.box(x + CHIP * (1 - rest), y - 9, CHIP * rest, 18, fill=theme().formats[other])
    words = f"{100 * error:.2f} %" + (f" · {100 * fallback:.0f} %" if rest > 0 else "")
    drawing.text(x + CHIP / 2, y, words, at="center", zorder=3)
