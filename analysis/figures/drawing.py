"""Draw schematics of boxes, arrows and text, and the matrix products (GEMMs) of a linear layer with a recipe.

Coordinates and lengths are in points, from the lower left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from fewbits.analysis.figures.theme import SMALL, WIDTH, ink, theme
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.hooks import Chain
from fewbits.models.recipe import AXES, FIRST_SLOT, Operands, Recipe

POINTS = 72 * WIDTH  # the width of a drawing in points
FORMATS = ("E4M3", "E5M2", "BF16")  # the formats for which themes have fills
E4M3, E5M2, BF16 = range(3)  # indices into FORMATS and Theme.formats


class Drawing:
    """A figure to draw in, POINTS wide. height: in points."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, POINTS), ylim=(0, height))
        self.axes.axis("off")
        self.height = height

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        at: str = "left",
        bold: bool = False,
        quiet: bool = False,
        size: float = SMALL,
        color: str = "",
        **options: Any,
    ) -> None:
        """Write text whose left end, center or right end (`at`) is at x, and whose vertical middle is at y."""
        ink = color or (theme().quiet if quiet else theme().text)
        options = {"va": "center", "weight": "bold" if bold else "normal"} | options
        self.axes.text(x, y, words, ha=at, color=ink, fontsize=size, **options)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        *,
        fill: Any = "none",
        edge: str = "",
        line: float = 0.9,
        **options: Any,
    ) -> None:
        """Draw a rectangle from its lower left corner, with text in its middle; without `edge`, it has no outline."""
        colours = {"facecolor": fill, "edgecolor": getattr(theme(), edge) if edge else "none"}
        self.axes.add_patch(Rectangle((x, y), width, height, linewidth=line if edge else 0, zorder=2, **colours))
        if words:
            self.text(x + width / 2, y + height / 2, words, at="center", va="center_baseline", zorder=3, **options)

    def grid(
        self, x: float, top: float, cell: tuple[float, float], words: Any, fills: Any = "none", **options: Any
    ) -> None:
        """Draw a grid of boxes of size `cell` from its upper left corner; words and fills are by row and column."""
        width, height = cell
        for (i, j), text in np.ndenumerate(np.asarray(words, object)):
            fill = fills if isinstance(fills, str) else fills[i][j]
            color: dict[str, Any] = {} if isinstance(fill, str) else {"color": ink(fill)}
            self.box(x + j * width, top - (i + 1) * height, width, height, text, fill=fill, **color, **options)

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 7, "color": theme().quiet}
        self.axes.add_patch(FancyArrowPatch(start, end, linewidth=0.9, zorder=1, **look))

    def line(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.axes.plot(xs, ys, color=theme().quiet, linewidth=0.8)

    def format_key(self, formats: Sequence[int], y: float) -> None:
        """Draw a legend of the fills of these formats (indices into FORMATS) in a row at height y."""
        for i, one in enumerate(formats):
            self.box(10 + 62 * i, y - 5, 12, 10, fill=theme().formats[one])
            self.text(27 + 62 * i, y, FORMATS[one])


# -------------------------------------------------------------------------------- the products of a linear layer

HEADS = {"product, result": 4, "operand": 92, "transform": 136, "elements, blocks": 200, "rounding": 312}  # left edges
DIMENSIONS = {"x": ("tokens", "inputs"), "w": ("outputs", "inputs"), "dy": ("tokens", "outputs")}
FORMULAS = {"fprop": "y = x · wᵀ", "dgrad": "dx = dy · w", "wgrad": "dw = dyᵀ · x"}


@dataclass(frozen=True)
class Operand:
    """The texts of an operand's row: how a product quantizes it."""

    slot: str
    transform: str = ""
    elements: str = "as it is"  # the format and block
    rounding: str = ""
    same_as: str = ""  # an earlier slot in which the tensor has the same quantized values


def products(recipe: Recipe) -> tuple[Operand, ...]:
    """Return the operands of the three products of a linear layer with this recipe: Fprop, Dgrad and Wgrad."""
    return tuple(_operand(name, recipe.operands) for name in AXES)


def _operand(name: str, slots: Operands) -> Operand:
    slot, tensor = slots[name], name.partition(".")[2]
    q, first = slot.spec, FIRST_SLOT.get(name, "")
    if q is None:
        return Operand(name)
    same = first if first and slot.equals(slots[first]) else ""
    if not isinstance(q, Quantizer):
        return Operand(name, elements="a chain" if isinstance(q, Chain) else "a mixture", same_as=same)
    along = "" if q.block.rows == q.block.cols else f", {DIMENSIONS[tensor][slot.axis]}"
    elements = f"{str(q.format).upper()} {str(q.block).replace('x', '×')}{along}"
    return Operand(name, f"Hadamard {q.hadamard}" if q.hadamard else "", elements, q.rounding, same)


def draw_flow(recipe: Recipe, dtype: str) -> Figure:
    """Draw the operands of a linear layer's products as rows. dtype: that in which the model computes."""
    flow, colours = products(recipe), theme()
    drawing, of_weights = Drawing(18 * len(flow) + 26), recipe.wgrad.output
    for words, x in HEADS.items():
        drawing.text(x, drawing.height - 10, words, quiet=True)
    for i, one in enumerate(flow):
        y, (gemm, _, tensor) = drawing.height - 28 - 18 * i, one.slot.partition(".")
        result = of_weights if gemm == "wgrad" and of_weights != "compute" else dtype
        if i % 2 == 0:
            drawing.line([4, POINTS - 4], [y + 9] * 2)
            drawing.text(4, y, f"{gemm.capitalize()}, {result.upper()}", bold=True)
        else:
            drawing.text(4, y, FORMULAS[gemm], quiet=True)
        if one.rounding == "stochastic":
            drawing.box(HEADS["rounding"] - 4, y - 8, 60, 16, fill=colours.formats[E5M2])
        texts = (tensor, one.transform, one.elements, one.rounding)
        for x, words in zip(list(HEADS.values())[1:], texts, strict=True):
            drawing.text(x, y, words, zorder=3)
        if one.same_as:
            drawing.text(POINTS - 4, y, f"= {one.same_as}", at="right", color=colours.line)
    return drawing.figure


def scalings_text(recipe: Recipe) -> str:
    """Return the names of the scalings of a recipe's quantizers, joined by "and"; "none" if it has no quantizer."""
    found = [str(spec.scaling) for spec in recipe.specs if isinstance(spec, Quantizer)]
    return " and ".join(dict.fromkeys(found)) or "none"


def kept_text(recipe: Recipe) -> str:
    """Return a sentence that says which blocks of layers stay in high precision."""
    keep = recipe.keep
    ends = [f"the {name} {n}" for name, n in (("first", keep.first), ("last", keep.last)) if n]
    return f"Blocks that stay {keep.by}: {' and '.join(ends)}." if ends else "No block stays high."
