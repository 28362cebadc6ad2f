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

from fewbits.analysis.figures.theme import SMALL, TEXT, WIDTH, ink, theme
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.chain import Chain
from fewbits.models.recipe import Recipe, Slot

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
        """Write text whose left end, center or right end (`at`) is at x, and whose vertical middle is at y.

        size: in points. color: as #rrggbb; if empty, the theme's text colour, or its quiet colour if `quiet`. options:
        those of Axes.text.
        """
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
        """Draw a rectangle with its lower left corner at x and y, and with the text `words` in its middle.

        fill: a colour of matplotlib. edge: the name of the outline's colour in the theme; without it, there is none.
        line: the width of the outline. options: those of `text`.
        """
        colours = {"facecolor": fill, "edgecolor": getattr(theme(), edge) if edge else "none"}
        self.axes.add_patch(Rectangle((x, y), width, height, linewidth=line if edge else 0, zorder=2, **colours))
        if words:
            self.text(x + width / 2, y + height / 2, words, at="center", va="center_baseline", zorder=3, **options)

    def grid(
        self, x: float, top: float, cell: tuple[float, float], words: Any, fills: Any = "none", **options: Any
    ) -> None:
        """Draw a grid of boxes whose upper left corner is (x, top).

        cell: the width and height of a box. words: the texts by row and column. fills: the colours by row and column,
        or one colour for all; on a colour of four numbers, text is black or white. options: those of `box`.
        """
        width, height = cell
        for (i, j), text in np.ndenumerate(np.asarray(words, object)):
            fill = fills if isinstance(fills, str) else fills[i][j]
            color: dict[str, Any] = {} if isinstance(fill, str) else {"color": ink(fill)}
            self.box(x + j * width, top - (i + 1) * height, width, height, text, fill=fill, **color, **options)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, style: str = "-|>", edge: str = "quiet"
    ) -> None:
        """Draw an arrow. style: an arrow style of matplotlib; edge: the name of a colour of the theme."""
        look: dict[str, Any] = {"arrowstyle": style, "mutation_scale": 7, "color": getattr(theme(), edge)}
        self.axes.add_patch(FancyArrowPatch(start, end, linewidth=0.9, zorder=1, **look))

    def line(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Draw a line in the theme's quiet colour through these points."""
        self.axes.plot(xs, ys, color=theme().quiet, linewidth=0.8)

    def format_key(self, formats: Sequence[int], y: float) -> None:
        """Draw a legend of the fills of these formats (indices into FORMATS) in a row at height y."""
        for i, one in enumerate(formats):
            self.box(10 + 62 * i, y - 5, 12, 10, fill=theme().formats[one])
            self.text(27 + 62 * i, y, FORMATS[one])


# -------------------------------------------------------------------------------- the products of a linear layer

# Positions and lengths in points.
BAND = 78.0  # the height of the drawing of one product
TRANSFORM, ELEMENTS, ROUNDING = 44.0, 116.0, 234.0  # left edges of the boxes that show how an operand is quantized
PRODUCT, RESULT = 308.0, 366.0  # left edges of the box of the GEMM and of its result
DIMENSIONS = {"x": ("tokens", "inputs"), "w": ("outputs", "inputs"), "dy": ("tokens", "outputs")}


@dataclass(frozen=True)
class Operand:
    """An operand of a product, with the texts of the boxes that show how it is quantized."""

    tensor: str  # x, w or dy
    transform: str = ""
    elements: str = ""  # the format and block; empty if the operand is not quantized
    rounding: str = ""
    same: bool = False  # whether the product drawn above uses the same quantized values of this tensor


@dataclass(frozen=True)
class Product:
    name: str
    formula: str
    operands: tuple[Operand, Operand]
    result: str
    dtype: str


def products(recipe: Recipe, dtype: str) -> tuple[Product, ...]:
    """Return the three products of a linear layer with this recipe: Fprop, Dgrad and Wgrad.

    The last operand of a product is the same tensor as the first operand of the next product. dtype: the dtype in which
    the model computes.
    """
    o = recipe.operands
    last = dtype if recipe.wgrad.output == "compute" else recipe.wgrad.output
    fprop = (_operand("x", o["fprop.x"]), _operand("w", o["fprop.w"]))
    dgrad = (_operand("w", o["dgrad.w"], o["fprop.w"]), _operand("dy", o["dgrad.dy"]))
    wgrad = (_operand("dy", o["wgrad.dy"], o["dgrad.dy"]), _operand("x", o["wgrad.x"]))
    return (
        Product("Fprop", "y = x · wᵀ", fprop, "y", dtype.upper()),
        Product("Dgrad", "dx = dy · w", dgrad, "dx", dtype.upper()),
        Product("Wgrad", "dw = dyᵀ · x", wgrad, "dw", last.upper()),
    )


def _operand(tensor: str, slot: Slot, before: Slot | None = None) -> Operand:
    same = before is not None and slot.equals(before)
    if slot.spec is None:
        return Operand(tensor, same=same)
    if not isinstance(slot.spec, Quantizer):
        return Operand(tensor, elements="a chain" if isinstance(slot.spec, Chain) else "a mixture", same=same)
    q = slot.spec
    along = "" if q.block.rows == q.block.cols else f", {DIMENSIONS[tensor][slot.axis]}"
    transform = f"Hadamard {q.hadamard}" if q.hadamard else ""
    block = str(q.block).replace("x", "×")
    return Operand(tensor, transform, f"{str(q.format).upper()} {block}{along}", q.rounding, same)


def draw_flow(flow: Sequence[Product]) -> Figure:
    """Draw the products below each other. The boxes of an operand show from left to right how it is quantized."""
    drawing = Drawing(20 + BAND * len(flow))
    heads = {TRANSFORM: "transform", ELEMENTS: "elements, blocks", ROUNDING: "rounding"}
    for x, words in heads.items():
        drawing.text(x, drawing.height - 10, words, quiet=True)
    for i, product in enumerate(flow):
        _product(drawing, product, drawing.height - 24 - i * BAND)
    return drawing.figure


def _product(drawing: Drawing, product: Product, top: float) -> None:
    drawing.text(4, top - 4, f"{product.name}:  {product.formula}", bold=True, size=TEXT)
    lines = (top - 24, top - 50)
    for y, operand in zip(lines, product.operands, strict=True):
        _operand_line(drawing, operand, y)
    middle = sum(lines) / 2
    drawing.box(PRODUCT, lines[1] - 9, 40, lines[0] - lines[1] + 18, "GEMM", edge="text", line=1, bold=True)
    drawing.arrow((PRODUCT + 40, middle), (RESULT, middle))
    drawing.text(RESULT + 18, middle + 6, product.result, at="center", bold=True, size=TEXT)
    drawing.text(RESULT + 18, middle - 7, product.dtype, at="center", quiet=True)


def _operand_line(drawing: Drawing, operand: Operand, y: float) -> None:
    """Draw an operand, the boxes that show how it is quantized, and an arrow through them to the GEMM."""
    fills = theme().formats
    drawing.text(20, y, operand.tensor, at="center", bold=True, size=TEXT)
    drawing.arrow((32, y), (PRODUCT, y))
    boxes = (
        (TRANSFORM, 64, operand.transform, fills[0]),
        (ELEMENTS, 110, operand.elements or "as it is", "" if operand.elements else fills[2]),
        (ROUNDING, 64, operand.rounding, fills[1] if operand.rounding == "stochastic" else ""),
    )
    for x, width, words, fill in boxes:
        if words:
            drawing.box(x, y - 8.5, width, 17, words, fill=fill or theme().background, edge="quiet", line=0.8)
    if operand.same:
        x, bottom, top = ELEMENTS + 55, y + 9, y + 9 + BAND - 44
        drawing.arrow((x, bottom), (x, top), style="<->", edge="line")
        drawing.text(x + 6, (bottom + top) / 2, "the same values", color=theme().line)


def scalings_text(recipe: Recipe) -> str:
    """Return the names of the scalings of a recipe's quantizers, joined by "and"; "none" if it has no quantizer."""
    found = [str(spec.scaling) for spec in recipe.specs if isinstance(spec, Quantizer)]
    return " and ".join(dict.fromkeys(found)) or "none"


def kept_text(recipe: Recipe) -> str:
    """Return a sentence that says which blocks of layers stay in high precision."""
    keep = recipe.keep
    ends = [f"the {name} {n}" for name, n in (("first", keep.first), ("last", keep.last)) if n]
    return f"Blocks that stay {keep.by}: {' and '.join(ends)}." if ends else "No block stays high."
