"""Draw MoR's Figures 1 to 4: a trained block with its formats, and how MoR scales, chooses formats and rounds.

The tensors of Figures 2 to 4 are random, from fixed seeds. Their magnitudes are log-normal (with heavy tails), because
all decisions would be the same for normally distributed values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import sweep_places
from fewbits.analysis.figures.drawing import BF16, E4M3, E5M2, FORMATS, POINTS, Drawing
from fewbits.analysis.figures.theme import TEXT, shades, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.tensors import DY, ONE, THRESHOLD, TITLES, W, X, decisions, share
from fewbits.analysis.views.html import RAISED
from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.registry import on_meta
from fewbits.sweeps.planning.store import State

# -------------------------------------------------------------------------------- Figure 1

# The label of the operation before the last linear layer of a block's branch (attention or feed-forward network), by
# the branch's name or, for a feed-forward network, by its activation.
BETWEEN = {"attention": "causal attention", "relu2": "squared ReLU", "gelu": "GELU", "swiglu": "SiLU × gate"}
TENSORS = ((184.0, "input x", X), (257.0, "weight w", W), (330.0, "gradient dy", DY))  # left edge, heading, slot
HEIGHT, LEFT, WIDTH, CHIP = 25.0, 22.0, 150.0, 68.0  # in points: a step's row, the box of a step, the box of a tensor
SUM = "⊕"  # the step that adds the output of attention or FFN to the residual stream


class Step(NamedTuple):
    """A step of a transformer block as the figure shows it: a linear layer or another operation."""

    words: str  # the label
    part: str | None = None  # for a linear layer only: the name of the part, such as qkv
    shape: str = ""  # for a linear layer only, for example "64 → 192"


@figure("mor", "Figure 1")
def figure_1(results: Results) -> Picture:
    """Draw the Transformer block with the largest share of fallbacks, with the error and decision of each tensor."""
    part = sweep_places(results, "partitions", ONE)
    if isinstance(part, NotPlanned):
        return part
    frame = decisions(part)
    frame, block = last_windows(frame[(frame["arm"] == "block") & (frame["state"] == State.DONE)]), 0
    if not frame.empty:
        shares = share(frame, ["block"])
        block = int(shares["block"].iloc[shares["value"].argmax()])
    model = results.plan.trials[part.members[0].id].trial.model
    steps, of = list(block_steps(model, block)), frame[frame["block"] == block]

    def draw() -> Figure:
        drawing, middle, branch = Drawing(HEIGHT * len(steps) + 38), LEFT + WIDTH / 2, 0
        drawing.format_key((E4M3, BF16), drawing.height - 14)
        for x, words, _ in TENSORS:
            drawing.text(x + CHIP / 2, drawing.height - 14, words, at="center", quiet=True)
        for i, step in enumerate(steps):
            y = drawing.height - 46 - HEIGHT * i
            if i:
                drawing.arrow((middle, y + 17), (middle, y + 9))
            if step.words == SUM:  # draw the residual stream: a line from above the branch's norm to the addition
                drawing.text(middle, y, SUM, at="center", size=TEXT + 3)
                start = y + HEIGHT * (i - branch) + 13
                drawing.line([middle, 8, 8, middle - 6], [start, start, y, y])
                branch = i + 1
            elif step.part is None:
                drawing.box(LEFT, y - 9, WIDTH, 18, step.words, edge="grid", quiet=True)
            else:
                drawing.box(LEFT, y - 9, WIDTH, 18, edge="text")
                drawing.text(LEFT + 6, y, step.words, bold=True)
                drawing.text(LEFT + WIDTH - 6, y, step.shape, at="right")
                for x, _, slot in TENSORS:
                    _draw_decision(drawing, x, y, of[(of["part"] == step.part) & (of["slot"] == slot)])
        return drawing.figure

    numbers = "Last window of Block; the layer with most fallbacks." if len(of) else "No finished run has decisions."
    note = (
        f"Layer {block + 1} of {model.name} with {load_recipe('mor/block').fprop.x}: mean relative error in E4M3 and, "
        f"if decisions differ, the share of mini-batches in which the tensor stayed in BF16. {numbers}"
    )
    return FigureResult(draw, tuple(dict.fromkeys(of["id"])), (note,))


def block_steps(config: DecoderConfig, block: int) -> Iterator[Step]:
    """Yield the steps of one block of this model, from top to bottom. block: its index."""
    module = on_meta(config).blocks[block]
    assert isinstance(module, nn.Module)
    for branch in module.branches:  # type: ignore[union-attr]
        yield Step(type(getattr(module, f"{branch}_norm")).__name__)
        *linears, last = (
            Step(TITLES[str(linear.part)], str(linear.part), f"{linear.in_features} → {linear.out_features}")
            for linear in getattr(module, branch).modules()
            if isinstance(linear, Linear)
        )
        yield from (*linears, Step(BETWEEN[branch if branch in BETWEEN else config.activation]), last, Step(SUM))


def _draw_decision(drawing: Drawing, x: float, y: float, rows: pd.DataFrame) -> None:
    """Draw a tensor's box, shaded by the shares of mini-batches in each format; without rows, it is empty."""
    if rows.empty:
        drawing.box(x, y - 9, CHIP, 18, edge="grid")
        return
    error, fallback = (float(np.average(rows[name], weights=rows["batches"])) for name in ("error", "fallback"))
    most, other = (BF16, E4M3) if fallback > 0.5 else (E4M3, BF16)
    rest = min(fallback, 1 - fallback)
    drawing.box(x, y - 9, CHIP, 18, fill=theme().formats[most])
    if rest > 0:
        drawing.box(x + CHIP * (1 - rest), y - 9, CHIP * rest, 18, fill=theme().formats[other])
    words = f"{100 * error:.2f} %" + (f" · {100 * fallback:.0f} %" if rest > 0 else "")
    drawing.text(x + CHIP / 2, y, words, at="center", zorder=3)


# -------------------------------------------------------------------------------- Figure 2

SIDE, APART = 88.0, 100.0  # the side of a map and the distance of the left edges of neighbouring maps, in points
HEADS = ("log |x|", "scale over m", "error of E4M3", "one decision")
PARTITIONS = {"tensor": "tensor", "block, 4×4": "4x4", "channel": "channel"}  # label → spelling in a quantizer


@figure("mor", "Figure 2")
def figure_2(results: Results) -> Picture:
    """Draw GAM's exponents, the errors and the decision for one small tensor, with three partitions into blocks."""
    x = heavy_tailed(8, 8, deviation=4.0, seed=0)
    logs = x.float().abs().log2()

    def draw() -> Figure:
        drawing, (amax, mantissa, exponent) = Drawing(396), group_scale(x)
        top = drawing.height - 14
        drawing.text(8, top, f"max |x| = {amax:.4g}")
        drawing.text(POINTS / 2, top, f"448 / max |x| = {mantissa:.4f} · {power_of_two(exponent)}", at="center")
        drawing.text(POINTS - 8, top, f"kept for all: m = {mantissa:.4f}", at="right", bold=True)
        for i, words in enumerate(HEADS):
            drawing.text(8 + i * APART + SIDE / 2, top - 20, words, at="center", quiet=True)
        fills = shades()(((logs - logs.min()) / (logs.max() - logs.min())).numpy())
        for i, (name, block) in enumerate(PARTITIONS.items()):
            y = top - 50 - i * 116
            drawing.text(8, y + 4, name, bold=True, va="bottom")
            drawing.grid(8, y, (SIDE / 8, SIDE / 8), [[""] * 8] * 8, [[tuple(fill) for fill in row] for row in fills])
            _partition(drawing, x, Quantizer.parse(f"e4m3:{block}:gam"), y)
        return drawing.figure

    note = "An 8×8 tensor made for this figure, with log-normal magnitudes; larger magnitudes have a stronger colour."
    return FigureResult(draw, (), (note,))


def group_scale(x: Tensor) -> tuple[float, float, int]:
    """Return the largest magnitude of x, and the mantissa and exponent of a GAM scale for the whole tensor."""
    packed = encode(x, "e4m3:tensor:gam")
    assert packed.group_scales is not None
    assert packed.scales is not None
    return float(x.abs().max()), float(packed.group_scales[0]), int(packed.scales.flatten()[0]) - 127


def _partition(drawing: Drawing, x: Tensor, quantizer: Quantizer, top: float) -> None:
    """Draw a row of maps below the height `top`: the blocks, the exponents of their scales, errors, the decision."""
    rows, columns = quantizer.block.resolve(x.shape)
    scales, cell = encode(x, quantizer).scales, SIDE / x.shape[0]
    assert scales is not None
    _, each = fake_quantize(x, quantizer, stats="block")
    _, choice, whole = mix(x, f"{quantizer} @ error<{THRESHOLD} | bf16", stats=True)
    exponents = [[power_of_two(int(code) - 127) for code in row] for row in scales.reshape(each.error.shape)]
    errors = [[f"{100 * float(error):.1f} %" for error in row] for row in each.error]
    for i, words in enumerate(([[""] * len(row) for row in errors], exponents, errors)):
        left = 8 + i * APART
        drawing.grid(left, top, (columns * cell, rows * cell), words, edge="text", line=0.8)
        drawing.arrow((left + SIDE + 1, top - SIDE / 2), (left + 99, top - SIDE / 2))
    taken, left = E4M3 if int(choice) == 0 else BF16, 8 + 3 * APART
    drawing.box(left, top - SIDE, SIDE, SIDE, fill=theme().formats[taken])
    error, sign = float(whole.error), "<" if taken == E4M3 else "≥"
    lines = (f"Σ / {int(whole.nonzeros)} = {100 * error:.2f} %", f"{sign} {100 * THRESHOLD:g} %", FORMATS[taken])
    for i, text in enumerate(lines):
        drawing.text(left + SIDE / 2, top - SIDE * (0.27 + 0.23 * i), text, at="center", bold=i == 2, zorder=3)


# -------------------------------------------------------------------------------- Figure 3


@figure("mor", "Figure 3")
def figure_3(results: Results) -> Picture:
    """Draw the formats of three-way MoR for blocks of A and B, and of A·B's products: the wider one of each pair."""
    mixture = Mixture.parse(load_recipe("mor/three-way").fprop.x)
    rows, inner, columns = 3, 4, 3
    a, b = choices(rows, inner, mixture, seed=1), choices(inner, columns, mixture, seed=2)
    promoted = np.maximum(a[:, :, None], b[None, :, :])  # (rows, inner, columns): the wider of the two formats

    def draw() -> Figure:
        size, gap = 48.0, 18.0
        drawing = Drawing(size * (rows + inner) + gap + 52)
        left, top = (POINTS - size * (inner + columns) - gap) / 2, drawing.height - 26
        drawing.format_key((E4M3, E5M2, BF16), drawing.height - 12)
        below, right = top - size * inner - gap, left + size * inner + gap
        products = promoted.reshape(rows * inner, columns)
        for grid, x, y, height in (
            (a, left, below, size),
            (b, right, top, size),
            (products, right, below, size / inner),
        ):
            words, fills = (np.array(of, object)[grid] for of in (FORMATS, theme().formats))
            drawing.grid(x, y, (size, height), words, fills, edge="background", line=0.6)
        drawing.grid(right, below, (size, size), [[""] * columns] * rows, edge="text", line=1.1)
        drawing.text(left + size * inner / 2, below + 8, "A: 3×4 blocks", at="center", quiet=True)
        drawing.text(right - 8, top - size * inner / 2, "B: 4×3 blocks", at="right", quiet=True)
        words = "A·B: four products in each block, in the higher type"
        drawing.text(POINTS - 110, below - size * rows - 11, words, at="center", quiet=True)
        return drawing.figure

    parts = ", ".join(f"{(promoted == i).mean():.0%} in {name}" for i, name in enumerate(FORMATS))
    notes = (
        f"Decisions of {mixture} for tensors made for this figure, whose 128×128 blocks differ in the spread of their "
        f"magnitudes. Shares of the {promoted.size} block products: {parts}.",
    )
    return FigureResult(draw, (), notes)


def choices(rows: int, columns: int, mixture: Mixture, seed: int) -> np.ndarray:
    """Return the index of the quantizer that the mixture chooses for each 128×128 block of a random tensor."""
    generator = torch.Generator().manual_seed(seed)
    spread = 2.4 + 1.4 * torch.randn(rows, columns, generator=generator)
    deviation = spread.abs().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return mix(_lognormal(128 * rows, 128 * columns, deviation, generator), mixture)[1].numpy().astype(int)


# -------------------------------------------------------------------------------- Figure 4

STATIONS = (  # the labels of the steps of fake quantization, from top to bottom
    *("x in BF16", "times the scale", "cast: E4M3's code", "its value", "over the scale, FP32", "again in BF16"),
    *("error before, %", "error after, %"),
)
FP32, AGAIN = 4, 5  # the indices of the steps before and after the second rounding


@figure("mor", "Figure 4")
def figure_4(results: Results) -> Picture:
    """Draw three values at each step of fake quantization, with a GAM scale and with a power of two as scale."""
    x = heavy_tailed(2, 4, deviation=2.0, seed=3)
    flows = {name: flow(x, f"e4m3:1x4:{scaling}") for name, scaling in (("GAM", "gam"), ("E8M0", "e8m0"))}
    moved = {name: steps[FP32] != steps[AGAIN] for name, (_, steps) in flows.items()}  # by value

    def draw() -> Figure:
        row, left, wide = 30.0, 122.0, 46.5
        drawing = Drawing(row * len(STATIONS) + 40)
        top = drawing.height - 33
        for side, (name, (scale, steps)) in enumerate(flows.items()):
            start = left + side * 3 * wide
            drawing.box(start + 2, 6, 3 * wide - 4, drawing.height - 14, edge="grid")
            drawing.text(start + 1.5 * wide, top + 13, f"{name}: scale {scale:.6g}", at="center", bold=True)
            drawing.grid(start, top, (wide, row), steps)
            for value in np.flatnonzero(moved[name]):
                drawing.box(start + value * wide + 4, top - (AGAIN + 1) * row + 6, wide - 8, row - 12, edge="line")
        for i, words in enumerate(STATIONS):
            y = top - (i + 0.5) * row
            drawing.text(left - 8, y, words, at="right", quiet=True)
            if i < AGAIN:
                drawing.arrow((12, y - 4), (12, y - row + 5))
        drawing.line([4, POINTS - 4], [top - (AGAIN + 1) * row] * 2)
        return drawing.figure

    notes = (
        "Three values of a small block. Dividing values of E4M3 by a power of two is exact in BF16. Dividing them by "
        "GAM's scale gives numbers with more bits than BF16 has, so they are rounded a second time "
        f"({moved['GAM'].sum()} of 3 change here).",
    )
    return FigureResult(draw, (), notes)


def flow(x: Tensor, spelling: str) -> tuple[float, np.ndarray]:
    """Return the scale, and the first three values of the second row of x at every step of fake quantization, as text.

    spelling: the quantizer, as text. The maximum of x has to be in another row, so that GAM's mantissa is not computed
    from a value of this row.
    """
    quantizer = Quantizer.parse(spelling)
    packed = encode(x, quantizer)
    assert packed.scales is not None
    code, group = int(packed.scales.flatten()[1]), packed.group_scales
    # GAM stores the exponent of the encoding factor, E8M0 that of the decoding factor
    scale = 2.0 ** (127 - code) if group is None else 2.0 ** (code - 127) * float(group[0])
    values, codes = x[1, :3].float(), packed.codes[1, :3].tolist()
    wide, back = fake_quantize(x.float(), quantizer)[1, :3], fake_quantize(x, quantizer)[1, :3].float()
    numbers = (values, values * scale, [quantizer.format.decode(n) for n in codes], wide, back)
    texts = [[f"{float(n):.5g}".replace("-", "−") for n in row] for row in numbers]
    errors = [[f"{float(n):.3f}" for n in (100 * (found - values) / values).abs()] for found in (wide, back)]
    return scale, np.array([*texts[:2], [f"0x{code:02x}" for code in codes], *texts[2:], *errors], object)


def heavy_tailed(rows: int, columns: int, *, deviation: float, seed: int) -> Tensor:
    """Return a BF16 tensor with random signs, in which log2 |x| is normal with mean 0 and this standard deviation."""
    return _lognormal(rows, columns, deviation, torch.Generator().manual_seed(seed))


def _lognormal(rows: int, columns: int, deviation: float | Tensor, generator: torch.Generator) -> Tensor:
    sign = torch.randn(rows, columns, generator=generator).sign()
    return (sign * torch.exp2(deviation * torch.randn(rows, columns, generator=generator))).bfloat16()


def power_of_two(exponent: int) -> str:
    return "2" + str(exponent).translate(RAISED)
