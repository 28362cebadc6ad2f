"""Figures 1 and 5: a random matrix that `encode` has encoded in NVFP4, and the GEMMs of a linear layer.

The kernels and the recipe supply all numbers and descriptions, so the figures agree with the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.drawing import POINTS, Drawing, draw_flow, kept_text, products, scalings_text
from fewbits.analysis.figures.theme import ink, shades
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


@dataclass(frozen=True)
class Matrix:
    """A matrix and its NVFP4 encoding; arrays are by row and column, those of scales by row and block."""

    x: Tensor
    packed: Packed
    codes: np.ndarray  # four bits each; the highest bit is the sign
    values: np.ndarray  # the E2M1 values of the codes, not multiplied by scales
    scales: np.ndarray  # of the blocks, as numbers that E4M3 represents
    tensor_scale: float
    greatest: np.ndarray  # by row and block, the matrix column of the (first) greatest magnitude


def _decoded(codes: np.ndarray, of: Format) -> np.ndarray:
    return np.array([[of.decode(int(code)) for code in row] for row in codes])


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
    places = x.float().abs().view(ROWS, -1, BLOCK).argmax(-1) + torch.arange(0, COLUMNS, BLOCK)
    values, scales = _decoded(codes, packed.quantizer.format), _decoded(packed.scales.numpy(), Format.parse("e4m3"))
    return Matrix(x, packed, codes, values, scales, float(packed.group_scales[0]), places.numpy())


@figure("nvfp4", "Figure 1")
def figure_1(results: Results) -> Picture:
    """Draw the codes, block scales and tensor scale of a 16×32 matrix, and all steps of encoding one block."""
    of = matrix()

    def draw() -> Figure:
        drawing = Drawing(331)
        top = drawing.height - 36
        drawing.text(LEFT, top + 26, f"tensor scale, FP32: max |x| / (6 · 448) = {of.tensor_scale:.4g}", bold=True)
        for b, name in enumerate("AB"):
            drawing.text(LEFT + b * (BLOCK * CELL + GAP), top + 9, f"block {name}: 16 codes", quiet=True)
            drawing.text(SCALES + b * 26 + 24, top + 9, name, at="right", quiet=True)
        drawing.text(SCALES + 50, top + 26, "block scales, E4M3", at="right", quiet=True)
        for (i, j), value in np.ndenumerate(of.values):
            corner = (LEFT + j * CELL + (j // BLOCK) * GAP, top - (i + 1) * CELL)
            _code(drawing, corner, int(of.codes[i, j]), value, framed=j in of.greatest[i])
        for (i, b), scale in np.ndenumerate(of.scales):
            middle = top - (i + 0.5) * CELL
            drawing.text(SCALES + b * 26 + 24, middle, f"{scale:g}", at="right", va="center_baseline")
        _values_of_codes(drawing, top - ROWS * CELL - 18, of.packed.quantizer.format)
        _one_block(drawing, top - ROWS * CELL - 48, of)
        return drawing.figure

    exact = int((np.abs(of.values).reshape(ROWS, -1, BLOCK).max(-1) == 6).sum())
    notes = (
        f"A matrix of normally distributed values, with blocks of different magnitudes, encoded by {SPELLED}: "
        f"{8 * of.packed.nbytes} bits, {of.packed.bits_per_element:.4g} per element (4.5 for a large tensor). Framed: "
        f"the greatest value of a block, which becomes ±6 in {exact} of {of.scales.size} blocks.",
    )
    return FigureResult(draw, (), notes)


def _code(drawing: Drawing, corner: tuple[float, float], code: int, value: float, *, framed: bool = False) -> None:
    """Draw a code as a hexadecimal digit in a box, which is shaded by the value's magnitude and may have a frame.

    corner: the lower left corner of the box.
    """
    fill = shades()(abs(value) / 6)
    inset, edge = (0.7, "line") if framed else (0.0, "")
    x, y = corner
    side = CELL - 2 * inset
    drawing.box(x + inset, y + inset, side, side, f"{code:X}", fill=fill, edge=edge, line=1.4, color=ink(fill))


def _values_of_codes(drawing: Drawing, y: float, element: Format) -> None:
    """Draw a legend at height y: for each magnitude of the format, the codes of its two signs and its value."""
    width = (POINTS - 2 * LEFT) / 8
    for code in range(8):
        x, value = LEFT + code * width, element.decode(code)
        _code(drawing, (x, y - 5), code, value)
        _code(drawing, (x + CELL + 1, y - 5), code + 8, value)
        spelled = f"±{value:g}".replace("0.5", "½").replace("1.5", "1½")
        drawing.text(x + 2 * CELL + 4, y, spelled, va="center_baseline")


def _one_block(drawing: Drawing, y: float, of: Matrix) -> None:
    """Draw the matrix's first block below height y: its scaled values, their codes, and the values of the codes."""
    row, width = 0, (POINTS - 2 * LEFT) / BLOCK
    scale = float(of.scales[row, 0])
    x = of.x[row, :BLOCK].float().numpy()
    scaled = x / (scale * of.tensor_scale)
    error = abs(decode(of.packed)[row, :BLOCK].float().numpy() - x).max()
    head = f"block A of the first row: x / (tensor scale · {scale:g}), and the nearest of E2M1"
    drawing.text(LEFT, y, head, bold=True)
    for j in range(BLOCK):
        middle, greatest = LEFT + (j + 0.5) * width, j in of.greatest[row]
        for k, words in enumerate((f"{scaled[j]:.1f}", f"{of.values[row, j]:g}")):
            text = words.replace("-", "−")
            drawing.text(middle, y - 18 - 32 * k, text, at="center", bold=greatest, quiet=k == 0)
        corner = (middle - CELL / 2, y - 34 - CELL / 2)
        _code(drawing, corner, int(of.codes[row, j]), float(of.values[row, j]), framed=greatest)
    last = f"times both scales: within {error:.2g} of x, whose greatest magnitude is {abs(x).max():.3g}"
    drawing.text(LEFT, y - 66, last, quiet=True)


# -------------------------------------------------------------------------------- Figure 5


@figure("nvfp4", "Figure 5")
def figure_5(results: Results) -> Picture:
    """Draw the three products of a linear layer and how NVFP4's recipe quantizes each operand."""
    recipe, dtype = recipe_of(results.plan)
    flow = products(recipe, dtype)

    notes = (
        f"Drawn from the recipe {recipe.name}, with scales {scalings_text(recipe)}. {kept_text(recipe)} Blocks of one "
        "row are along the named dimension, over which the product sums.",
    )
    return FigureResult(lambda: draw_flow(flow), (), notes)


def recipe_of(plan: Plan) -> tuple[Recipe, str]:
    """Return the recipe of the arm `nvfp4` in the plan's sweep `recipe`, and the dtype in which its model computes.

    If the plan does not have this arm, return the recipe `nvfp4` with its default settings and bf16.
    """
    for member in plan.members:
        if (member.cell.sweep, member.cell.arm) == ("recipe", "nvfp4"):
            trial = plan.trials[member.id].trial
            return trial.recipe, trial.training.dtype
    return load_recipe("nvfp4"), "bf16"
