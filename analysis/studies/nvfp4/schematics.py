"""Figures 1 and 5: a random matrix that `encode` has encoded in NVFP4, and the GEMMs of a linear layer.

The kernels and the recipe supply all numbers and descriptions, so the figures agree with the code.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.drawing import POINTS, Drawing, draw_flow, kept_text, scalings_text
from fewbits.analysis.figures.theme import shades
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.experiments.config import load_recipe
from fewbits.kernels.formats import Format
from fewbits.kernels.packed import Packed, decode, encode
from fewbits.kernels.packing import unpack
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.plan import Plan

SPELLED = "e2m1:1x16:nvfp4"
ROWS, COLUMNS, BLOCK = 16, 32, 16


# -------------------------------------------------------------------------------- Figure 1

CELL, GAP, LEFT = 10.6, 4.0, 4.0  # in points: the side of a code's box, the gap between blocks, the left margin
SCALES = LEFT + COLUMNS * CELL + GAP + 2  # the left edge of the block scales
E2M1, E4M3 = Format.parse("e2m1"), Format.parse("e4m3")


class Matrix(NamedTuple):
    """A matrix and its NVFP4 encoding; arrays are by row and column, those of scales by row and block."""

    x: Tensor
    packed: Packed
    codes: np.ndarray  # four bits each; the highest bit is the sign
    values: np.ndarray  # the E2M1 values of the codes, not multiplied by scales
    scales: np.ndarray  # of the blocks, as numbers that E4M3 represents
    tensor_scale: float
    greatest: np.ndarray  # true for the (first) greatest magnitude of each block


@cache
def matrix() -> Matrix:
    """Return a matrix of normally distributed values and its encoding; blocks differ in magnitude as in activations."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    size = torch.exp2(-3 * torch.rand(ROWS, COLUMNS // BLOCK, generator=generator))
    x = (x * size.repeat_interleave(BLOCK, 1)).bfloat16()
    packed = encode(x, SPELLED)
    assert packed.scales is not None
    assert packed.group_scales is not None
    codes = unpack(packed.codes, 4, COLUMNS).numpy()
    values, scales = (
        np.vectorize(of.decode, [float])(found.astype(object))  # of Python's integers
        for of, found in ((E2M1, codes), (E4M3, packed.scales.numpy()))
    )
    places = x.float().abs().view(ROWS, -1, BLOCK).argmax(-1, keepdim=True)
    greatest = torch.zeros(ROWS, COLUMNS // BLOCK, BLOCK).scatter(-1, places, 1).view(ROWS, COLUMNS).bool().numpy()
    return Matrix(x, packed, codes, values, scales, float(packed.group_scales[0]), greatest)


@figure("nvfp4", "Figure 1")
def figure_1(results: Results) -> Picture:
    """Draw the codes, block scales and tensor scale of a 16×32 matrix, and all steps of encoding one block."""
    of = matrix()

    def draw() -> Figure:
        drawing = Drawing(300)
        top = drawing.height - 36
        drawing.text(LEFT, top + 26, f"tensor scale, FP32: max |x| / (6 · 448) = {of.tensor_scale:.4g}", bold=True)
        drawing.text(SCALES + 50, top + 26, "block scales, E4M3", at="right", quiet=True)
        for b, name in enumerate("AB"):
            left, part = LEFT + b * (BLOCK * CELL + GAP), np.s_[:, b * BLOCK : (b + 1) * BLOCK]
            drawing.text(left, top + 9, f"block {name}: 16 codes", quiet=True)
            _codes(drawing, left, top, of, part, CELL)
            drawing.text(SCALES + b * 26 + 24, top + 9, name, at="right", quiet=True)
            for i, scale in enumerate(of.scales[:, b]):
                middle = top - (i + 0.5) * CELL
                drawing.text(SCALES + b * 26 + 24, middle, f"{scale:g}", at="right", va="center_baseline")
        _one_block(drawing, top - ROWS * CELL - 20, of)
        return drawing.figure

    exact = int((np.abs(of.values[of.greatest]) == 6).sum())
    notes = (
        f"A matrix of normally distributed values, with blocks of different magnitudes, encoded by {SPELLED}: "
        f"{8 * of.packed.nbytes} bits, {of.packed.bits_per_element:.4g} per element (4.5 for a large tensor). Framed: "
        f"the greatest value of a block, which becomes ±6 in {exact} of {of.scales.size} blocks.",
    )
    return FigureResult(draw, (), notes)


def _codes(drawing: Drawing, x: float, top: float, of: Matrix, part: tuple[slice, slice], width: float) -> None:
    """Draw codes as hexadecimal digits, shaded by the values' magnitudes; frame the greatest of each block."""
    words = [[f"{code:X}" for code in row] for row in of.codes[part]]
    drawing.grid(x, top, (width, CELL), words, shades()(abs(of.values[part]) / 6))
    for i, j in np.argwhere(of.greatest[part]):
        drawing.box(x + j * width + 0.7, top - (i + 1) * CELL + 0.7, width - 1.4, CELL - 1.4, edge="line", line=1.4)


def _one_block(drawing: Drawing, y: float, of: Matrix) -> None:
    """Draw the matrix's first block below height y: its scaled values, their codes, and the values of the codes."""
    width, scale, x = (POINTS - 2 * LEFT) / BLOCK, float(of.scales[0, 0]), of.x[0, :BLOCK].float().numpy()
    error = abs(decode(of.packed)[0, :BLOCK].float().numpy() - x).max()
    head = f"block A of the first row: x / (tensor scale · {scale:g}), and the nearest of E2M1"
    drawing.text(LEFT, y, head, bold=True)
    for j, scaled in enumerate(x / (scale * of.tensor_scale)):
        middle = LEFT + (j + 0.5) * width
        for k, words in enumerate((f"{scaled:.1f}".replace("-", "−"), f"{of.values[0, j]:g}".replace("-", "−"))):
            drawing.text(middle, y - 18 - 32 * k, words, at="center", bold=bool(of.greatest[0, j]), quiet=k == 0)
    _codes(drawing, LEFT, y - 34 + CELL / 2, of, np.s_[:1, :BLOCK], width)
    last = f"times both scales: within {error:.2g} of x, whose greatest magnitude is {abs(x).max():.3g}"
    drawing.text(LEFT, y - 66, last, quiet=True)


# -------------------------------------------------------------------------------- Figure 5


@figure("nvfp4", "Figure 5")
def figure_5(results: Results) -> Picture:
    """Draw the three products of a linear layer and how NVFP4's recipe quantizes each operand."""
    recipe, dtype = recipe_of(results.plan)
    notes = (
        f"Drawn from the recipe {recipe.name}, with scales {scalings_text(recipe)}. {kept_text(recipe)} Blocks of one "
        "row are along the named dimension, over which the product sums.",
    )
    return FigureResult(lambda: draw_flow(recipe, dtype), (), notes)


def recipe_of(plan: Plan) -> tuple[Recipe, str]:
    """Return the recipe and dtype of the plan's arm `nvfp4`; without this arm, the recipe's defaults and bf16."""
    for member in plan.members:
        if (member.cell.sweep, member.cell.arm) == ("recipe", "nvfp4"):
            trial = plan.trials[member.id].trial
            return trial.recipe, trial.training.dtype
    return load_recipe("nvfp4"), "bf16"
