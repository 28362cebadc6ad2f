"""Figures 1 and 5: a matrix in NVFP4, as our own `encode` gives it, and a linear layer as the recipe has it.

Every number and every word is read off the kernels and the recipe when the figure is drawn, so that neither can show
what they do not do. The matrix is made here from a fixed seed; nothing of it was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from fewbits.analysis import heat, plots
from fewbits.analysis.frames import Results
from fewbits.analysis.plots import SMALL, TEXT, WIDTH
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, Picture
from fewbits.experiments.config import load_recipe
from fewbits.kernels.formats import Format
from fewbits.kernels.packed import Packed, decode, encode
from fewbits.kernels.packing import unpack
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.recipe import Recipe, Slot
from fewbits.sweeps.planning.plan import Plan

POINTS = 72 * WIDTH
SPELLED = "e2m1:1x16:nvfp4"
ROWS, COLUMNS, BLOCK = 16, 32, 16


# -------------------------------------------------------------------------------- Figure 1


@dataclass(frozen=True)
class Matrix:
    """A matrix and what is stored of it."""

    x: Tensor
    packed: Packed

    @property
    def codes(self) -> np.ndarray:
        """Of four bits, the sign first."""
        return unpack(self.packed.codes, 4, COLUMNS).numpy()

    @property
    def values(self) -> np.ndarray:
        """That the codes stand for, in E2M1."""
        return _decoded(self.codes, self.packed.quantizer.format)

    @property
    def scales(self) -> np.ndarray:
        """One E4M3 value for each block."""
        assert self.packed.scales is not None
        return _decoded(self.packed.scales.numpy(), Format.parse("e4m3"))

    @property
    def tensor_scale(self) -> float:
        assert self.packed.group_scales is not None
        return float(self.packed.group_scales[0])

    @property
    def greatest(self) -> np.ndarray:
        """Of each row and block the column of the greatest magnitude: the first one, where several are."""
        magnitudes = self.x.float().abs().view(ROWS, -1, BLOCK)
        return (magnitudes.argmax(-1) + torch.arange(0, COLUMNS, BLOCK)).numpy()


def _decoded(codes: np.ndarray, of: Format) -> np.ndarray:
    return np.array([[of.decode(int(code)) for code in row] for row in codes])


@cache
def matrix() -> Matrix:
    """Normal values whose blocks differ in size, as activations' do."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    size = torch.exp2(-3 * torch.rand(ROWS, COLUMNS // BLOCK, generator=generator))
    x = (x * size.repeat_interleave(BLOCK, 1)).bfloat16()
    return Matrix(x, encode(x, SPELLED))


@figure("nvfp4", "Figure 1")
def figure_1(results: Results) -> Picture:
    """The codes of a 16×32 matrix, its block scales and its tensor scale; one block spelled out below."""
    of = matrix()

    def draw() -> Figure:
        height = 331.0
        picture, axes = plots.canvas(height / 72)
        top = height - 36
        _head(axes, height - 10, of)
        for (i, j), value in np.ndenumerate(of.values):
            greatest = j in of.greatest[i]
            _code(
                axes, LEFT + j * CELL + (j // BLOCK) * GAP, top - (i + 1) * CELL, int(of.codes[i, j]), value, greatest
            )
        for (i, b), scale in np.ndenumerate(of.scales):
            x = SCALES + b * 26
            axes.text(x + 24, top - (i + 0.5) * CELL, f"{scale:g}", ha="right", va="center_baseline", fontsize=SMALL)
        _values_of_codes(axes, top - ROWS * CELL - 18, of.packed.quantizer.format)
        _one_block(axes, top - ROWS * CELL - 48, of)
        return picture

    whole = 8 * of.packed.nbytes
    share = of.packed.bits_per_element
    exact = int((np.abs(of.values).reshape(ROWS, -1, BLOCK).max(-1) == 6).sum())
    notes = (
        f"Made by {SPELLED} of a matrix of normal values in blocks of unlike sizes: {whole} bits, {share:.4g} for each "
        f"element; 4.5 of a large tensor. Framed: the greatest of its block, which becomes ±6 in {exact} of "
        f"{of.scales.size} blocks.",
    )
    return FigureResult(draw, (), notes)


CELL, GAP, LEFT = 10.6, 4.0, 4.0
SCALES = LEFT + COLUMNS * CELL + GAP + 2  # left edge of the block scales


def _head(axes: Axes, y: float, of: Matrix) -> None:
    theme = plots.theme()
    said = f"tensor scale, FP32: max |x| / (6 · 448) = {of.tensor_scale:.4g}"
    axes.text(LEFT, y, said, va="center", fontsize=SMALL, weight="bold")
    for b in range(COLUMNS // BLOCK):
        x = LEFT + b * (BLOCK * CELL + GAP)
        axes.text(x, y - 17, f"block {'AB'[b]}: 16 codes", va="center", fontsize=SMALL, color=theme.quiet)
        axes.text(SCALES + b * 26 + 24, y - 17, "AB"[b], ha="right", va="center", fontsize=SMALL, color=theme.quiet)
    axes.text(SCALES + 50, y, "block scales, E4M3", ha="right", va="center", fontsize=SMALL, color=theme.quiet)


def _code(axes: Axes, x: float, y: float, code: int, value: float, greatest: bool, size: float = CELL) -> None:
    """One hexadecimal digit, on the shade of its magnitude."""
    theme = plots.theme()
    fill = heat.shades()(abs(value) / 6)
    frame = {"edgecolor": theme.line, "linewidth": 1.4, "zorder": 3} if greatest else {"linewidth": 0}
    inset = 0.7 if greatest else 0
    axes.add_patch(Rectangle((x + inset, y + inset), size - 2 * inset, size - 2 * inset, facecolor=fill, **frame))
    ink = heat.ink(fill)
    axes.text(
        x + size / 2, y + size / 2, f"{code:X}", ha="center", va="center_baseline", fontsize=SMALL, color=ink, zorder=4
    )


def _values_of_codes(axes: Axes, y: float, element: Format) -> None:
    """What the sixteen digits stand for."""
    width = (POINTS - 2 * LEFT) / 8
    for code in range(8):
        x = LEFT + code * width
        value = element.decode(code)
        _code(axes, x, y - 5, code, value, False)
        _code(axes, x + CELL + 1, y - 5, code + 8, value, False)
        spelled = f"±{value:g}".replace("0.5", "½").replace("1.5", "1½")
        axes.text(x + 2 * CELL + 4, y, spelled, va="center_baseline", fontsize=SMALL)


def _one_block(axes: Axes, y: float, of: Matrix) -> None:
    """From values to codes and back."""
    theme = plots.theme()
    row, width = 0, (POINTS - 2 * LEFT) / BLOCK
    scale = float(of.scales[row, 0])
    block = slice(0, BLOCK)
    x = of.x[row, block].float().numpy()
    scaled = x / (scale * of.tensor_scale)
    back = decode(of.packed)[row, block].float().numpy()
    error = abs(back - x).max()
    said = f"block A of the first row: x / (tensor scale · {scale:g}), and the nearest of E2M1"
    axes.text(LEFT, y, said, va="center", fontsize=SMALL, weight="bold")
    for j in range(BLOCK):
        middle = LEFT + (j + 0.5) * width
        greatest = j in of.greatest[row]
        words = (f"{scaled[j]:.1f}", f"{of.values[row, j]:g}")
        for k, word in enumerate(words):
            axes.text(
                middle,
                y - 18 - 32 * k,
                word.replace("-", "−"),
                ha="center",
                va="center",
                fontsize=SMALL,
                weight="bold" if greatest else "normal",
                color=theme.quiet if k == 0 else theme.text,
            )
        _code(axes, middle - CELL / 2, y - 34 - CELL / 2, int(of.codes[row, j]), float(of.values[row, j]), greatest)
    last = f"times both scales: within {error:.2g} of x, whose greatest magnitude is {abs(x).max():.3g}"
    axes.text(LEFT, y - 66, last, va="center", fontsize=SMALL, color=theme.quiet)


# -------------------------------------------------------------------------------- Figure 5


@dataclass(frozen=True)
class Operand:
    """One tensor on its way into one product, in words."""

    tensor: str
    transform: str  # none: ""
    elements: str  # "" where it stays as it is
    rounding: str
    same: bool = False  # the very values that the product before reads of this tensor


@dataclass(frozen=True)
class Product:
    name: str
    formula: str
    operands: tuple[Operand, Operand]
    result: str
    dtype: str


DIMENSIONS = {"x": ("tokens", "inputs"), "w": ("outputs", "inputs"), "dy": ("tokens", "outputs")}


def products(recipe: Recipe, dtype: str) -> tuple[Product, ...]:
    """The three of a linear layer, operands in an order that puts the same tensors next to each other.

    dtype: that the model computes in.
    """
    o = recipe.operands
    last = dtype if recipe.wgrad.output == "compute" else recipe.wgrad.output
    return (
        Product("Fprop", "y = x · wᵀ", (_operand("x", o["fprop.x"]), _operand("w", o["fprop.w"])), "y", dtype.upper()),
        Product(
            "Dgrad",
            "dx = dy · w",
            (_operand("w", o["dgrad.w"], o["fprop.w"]), _operand("dy", o["dgrad.dy"])),
            "dx",
            dtype.upper(),
        ),
        Product(
            "Wgrad",
            "dw = dyᵀ · x",
            (_operand("dy", o["wgrad.dy"], o["dgrad.dy"]), _operand("x", o["wgrad.x"])),
            "dw",
            last.upper(),
        ),
    )


def _operand(tensor: str, slot: Slot, before: Slot | None = None) -> Operand:
    same = before is not None and slot.equals(before)
    if slot.spec is None:
        return Operand(tensor, "", "", "", same)
    if not isinstance(slot.spec, Quantizer):
        return Operand(tensor, "", "a mixture", "", same)
    q = slot.spec
    along = "" if q.block.rows == q.block.cols else f", {DIMENSIONS[tensor][slot.axis]}"
    transform = f"Hadamard {q.hadamard}" if q.hadamard else ""
    block = str(q.block).replace("x", "×")
    return Operand(tensor, transform, f"{str(q.format).upper()} {block}{along}", q.rounding, same)


@figure("nvfp4", "Figure 5")
def figure_5(results: Results) -> Picture:
    """The three products of a linear layer, with what the recipe does to each operand."""
    recipe, dtype = recipe_of(results.plan)
    flow = products(recipe, dtype)

    def draw() -> Figure:
        height = 20 + BAND * len(flow)
        picture, axes = plots.canvas(height / 72)
        for x, words in zip(
            (TRANSFORM, ELEMENTS, ROUNDING), ("transform", "elements, blocks", "rounding"), strict=True
        ):
            axes.text(x, height - 10, words, va="center", fontsize=SMALL, color=plots.theme().quiet)
        for i, product in enumerate(flow):
            _product(axes, product, height - 24 - i * BAND)
        return picture

    notes = (
        f"Drawn from the recipe {recipe.name}, scales {_scalings(recipe)}. {_kept(recipe)} Blocks of one row lie along "
        "the dimension that is named, which their product sums over.",
    )
    return FigureResult(draw, (), notes)


BAND = 78.0  # height of a product's part
TRANSFORM, ELEMENTS, ROUNDING = 44.0, 116.0, 234.0  # left edges of what an operand is put through
PRODUCT, RESULT = 308.0, 366.0


def recipe_of(plan: Plan) -> tuple[Recipe, str]:
    """That of the arm `nvfp4` of the sweep `recipe`, and the dtype it computes in; without it, the tree's."""
    for member in plan.members:
        if (member.cell.sweep, member.cell.arm) == ("recipe", "nvfp4"):
            trial = plan.trials[member.id].trial
            return trial.recipe, trial.training.dtype
    return load_recipe("nvfp4"), "bf16"


def _product(axes: Axes, product: Product, top: float) -> None:
    theme = plots.theme()
    axes.text(4, top - 4, f"{product.name}:  {product.formula}", va="center", fontsize=TEXT, weight="bold")
    lines = (top - 24, top - 50)
    for y, operand in zip(lines, product.operands, strict=True):
        _operand_line(axes, operand, y)
    middle = sum(lines) / 2
    axes.add_patch(
        Rectangle((PRODUCT, lines[1] - 9), 40, lines[0] - lines[1] + 18, facecolor="none", edgecolor=theme.text)
    )
    axes.text(PRODUCT + 20, middle, "GEMM", ha="center", va="center", fontsize=SMALL, weight="bold")
    _arrow(axes, PRODUCT + 40, RESULT, middle)
    axes.text(RESULT + 18, middle + 6, product.result, ha="center", va="center", fontsize=TEXT, weight="bold")
    axes.text(RESULT + 18, middle - 7, product.dtype, ha="center", va="center", fontsize=SMALL, color=theme.quiet)


def _operand_line(axes: Axes, operand: Operand, y: float) -> None:
    """A tensor, and an arrow through the chips of what is done to it."""
    theme = plots.theme()
    axes.text(20, y, operand.tensor, ha="center", va="center", fontsize=TEXT, weight="bold")
    _arrow(axes, 32, PRODUCT, y)
    if operand.transform:
        _chip(axes, TRANSFORM, y, 64, operand.transform, theme.formats[0])
    _chip(axes, ELEMENTS, y, 110, operand.elements or "as it is", "" if operand.elements else theme.formats[2])
    if operand.rounding:
        _chip(axes, ROUNDING, y, 64, operand.rounding, theme.formats[1] if operand.rounding == "stochastic" else "")
    if operand.same:
        axes.annotate(
            "",
            (ELEMENTS + 55, y + 9),
            (ELEMENTS + 55, y + 9 + BAND - 44),
            arrowprops={"arrowstyle": "<->", "color": theme.line, "linewidth": 1.2},
        )
        axes.text(
            ELEMENTS + 61, y + 9 + (BAND - 44) / 2, "the same values", va="center", fontsize=SMALL, color=theme.line
        )


def _chip(axes: Axes, x: float, y: float, width: float, words: str, fill: str) -> None:
    theme = plots.theme()
    face = fill or theme.background
    axes.add_patch(Rectangle((x, y - 8.5), width, 17, facecolor=face, edgecolor=theme.quiet, linewidth=0.8, zorder=2))
    axes.text(x + width / 2, y, words, ha="center", va="center_baseline", fontsize=SMALL, zorder=3)


def _arrow(axes: Axes, start: float, end: float, y: float) -> None:
    colour = plots.theme().quiet
    axes.add_patch(
        FancyArrowPatch((start, y), (end, y), arrowstyle="-|>", mutation_scale=7, color=colour, linewidth=0.9, zorder=1)
    )


def _scalings(recipe: Recipe) -> str:
    found = [slot.spec.scaling for _, slot in recipe.operands.items() if isinstance(slot.spec, Quantizer)]
    return " and ".join(dict.fromkeys(found)) or "none"


def _kept(recipe: Recipe) -> str:
    """The blocks that none of it is done to."""
    keep = recipe.keep
    ends = [f"the {name} {n}" for name, n in (("first", keep.first), ("last", keep.last)) if n]
    return f"Blocks that stay {keep.by}: {' and '.join(ends)}." if ends else "No block stays high."
