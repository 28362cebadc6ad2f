"""Draw what noise and casts do to small matrices (Figures 2, D.1) and how a weight is sampled (C).

Values are computed by our kernels from fixed seeds each time the figures are drawn. The paper does not give the numbers
of its matrices, but what the figures show does not depend on them. INT4 is the uniform grid of 0, ±1 … ±7 steps (E1M2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.drawing import POINTS, Drawing
from fewbits.analysis.figures.theme import SMALL, STYLES, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.gaussws.exact import INT4, weights
from fewbits.analysis.studies.gaussws.theory import noise
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import Format
from fewbits.kernels.noise import sample_weight

SIDE, BLOCK, BITS, SEED = 4, 2, 4.0, 33  # the sides of a matrix and of a block, the bit width, the seed
CELL = 23.8  # the side of a cell in points
GAP = (POINTS - 4 * SIDE * CELL) / 5  # between four matrices in a row
SOURCE = "A 4×4 normal matrix from a fixed seed; the paper's values are not known."
Blocks = tuple[int, int]  # the rows and columns of a block


class Shown(NamedTuple):
    """A matrix to draw, with a number in each cell."""

    title: str
    values: Tensor
    blocks: Blocks = (SIDE, SIDE)  # the size of the blocks, which are outlined
    marked: Tensor | None = None  # true for the cells that are filled


@dataclass(frozen=True)
class Noisy:
    """A random matrix w, the kernel's noise on it, and what a cast Q to INT4 with w's block scales makes of it."""

    w: Tensor
    noise: Tensor  # as the backward pass uses it
    cast: Tensor  # Q(w + noise)
    effective: Tensor  # the noise after the cast: Q(w + noise) − Q(w)

    @property
    def swallowed(self) -> Tensor:
        """True for the elements whose noise is not 0 before the cast, but 0 after it."""
        return (self.noise != 0) & (self.effective == 0)


def noisy(kind: Literal["gaussian", "uniform"]) -> Noisy:
    w = weights(SEED, (SIDE, SIDE))
    bits = torch.full((SIDE // BLOCK, SIDE // BLOCK), BITS)
    sampled = sample_weight(w, bits, SEED, noise=kind, block=BLOCK, dtype=torch.float32)
    blocks = w.abs().view(SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK).amax((1, 3))
    step = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) / 7

    def cast(x: Tensor) -> Tensor:
        return fake_quantize(x / step * 0.5, INT4) * 2 * step  # E1M2 itself has steps of 0.5

    return Noisy(w, sampled - w, cast(sampled), cast(sampled) - cast(w))


@figure("gaussws", "Figure 2")
def figure_2(results: Results) -> Picture:
    """Draw the noise that the backward pass uses, and the noise that is left after a cast to INT4."""
    found = {"U(−½, ½)": noisy("uniform"), "GaussWS": noisy("gaussian")}
    squares = (BLOCK, BLOCK)
    rows = [
        (
            Shown("w", one.w, squares),
            Shown(f"noise, {name}", one.noise, squares, one.swallowed),
            Shown("Q(w + noise)", one.cast, squares),
            Shown("noise left", one.effective, squares, one.swallowed),
        )
        for name, one in found.items()
    ]
    counts = "; ".join(
        f"{name}: the cast swallows {int(one.swallowed.sum())} of {int((one.noise != 0).sum())} nonzero values of noise"
        for name, one in found.items()
    )
    notes = (
        f"{counts} (marked). The second row is our addition: rounded normal noise on the same matrix.",
        f"{SOURCE} Blocks of 2×2, {BITS:g} bits.",
    )
    return FigureResult(lambda: draw_matrices(rows), (), notes)


@figure("gaussws", "Figure D.1")
def figure_d1(results: Results) -> Picture:
    """Draw a weight as the forward and the backward pass quantize it, in blocks of one row and in square blocks."""
    w = weights(SEED + 1, (SIDE, SIDE))
    kinds: tuple[tuple[str, Blocks], ...] = (("vectors of 2", (1, BLOCK)), ("squares of 2", (BLOCK, BLOCK)))
    rows, differing = [], []
    for name, (high, wide) in kinds:
        spelled = f"{INT4}:{high}x{wide}:amax"
        forward, backward = fake_quantize(w, spelled), fake_quantize(w, spelled, axis=0)
        rows.append(
            (
                Shown("W", w),
                Shown(f"backward, {name.split()[0]}", backward, (wide, high)),
                Shown(f"forward, {name.split()[0]}", forward, (high, wide)),
                Shown("difference", forward - backward, marked=forward != backward),
            )
        )
        differing.append(f"{name}: {int((forward != backward).sum())} of {w.numel()} values differ")
    notes = (
        f"{'; '.join(differing)}. The second row is our addition: square blocks of the same matrix.",
        f"{SOURCE} INT4 with FP32 scales (assumed).",
    )
    return FigureResult(lambda: draw_matrices(rows), (), notes)


# -------------------------------------------------------------------------------- Figure C: Figure 1's schematic

# The weight, as a fraction of its block's maximum, its bit width, and the number of draws of its noise.
WEIGHT, WIDTH_BITS, DRAWS = 0.62, 5.0, 1 << 16
SEEN = (WEIGHT - 0.2, WEIGHT + 0.2)  # the range of the axis of the sampled weight
GRAPH, BELOW = 128.0, 240.0  # the heights of the computation graph and of the histograms, in points


@figure("gaussws", "Figure C", "How a weight is sampled, and the values that it gets beside FP6's (Figure 1a)")
def figure_c(results: Results) -> Picture:
    """Draw the computation of a sampled weight, and below it histograms of R and of one weight plus scaled noise."""
    values = {name: noise(kind, DRAWS, SEED).numpy() for name, kind in (("GaussWS", "gaussian"), ("DiffQ", "uniform"))}
    form = Format.parse("e3m2")
    held = [v / form.max for v in form.values() if SEEN[0] < v / form.max < SEEN[1]]

    def draw() -> Figure:
        drawing = Drawing(GRAPH + BELOW)
        _graph(drawing)
        for i, ((name, r), style) in enumerate(zip(values.items(), STYLES, strict=False)):
            low = (1 - i) * 0.5 * BELOW + 30
            left, right = (
                drawing.figure.add_axes((x / POINTS, low / drawing.height, wide / POINTS, 68 / drawing.height))
                for x, wide in ((42, 140), (224, 168))
            )
            if name == "GaussWS":
                places, counts = np.unique(r, return_counts=True)
                left.bar(places, counts / DRAWS, 0.5, color=style.shade)
            else:
                left.hist(r, bins=32, range=(-0.5, 0.5), density=True, color=style.shade)
            left.set(title=f"R of {name}", xlim=(-2.6, 2.6), ylabel="probability" if name == "GaussWS" else "density")
            right.hist(WEIGHT + r * 2.0 ** (1 - WIDTH_BITS), bins=200, range=SEEN, color=style.shade)
            right.set(title=f"w + R · 2^(1−b) · max, b = {WIDTH_BITS:g}", xlim=SEEN, yticks=[])
            for value in held:
                right.axvline(value, color=theme().quiet, linewidth=0.8, dashes=(2, 2))
            right.axvline(WEIGHT, color=theme().text, linewidth=0.8, zorder=0.5)
        right.set_xlabel("weight, in units of its block's maximum")
        return drawing.figure

    notes = (
        "Above: b is learned for each 32×32 square; the forward and both backward products use ŵ, and R is drawn again "
        "from its seed in the backward pass.",
        f"Below: {DRAWS:,} draws for one weight (solid line); dashed lines: values of FP6 E3M2. Rounded normal noise "
        "leaves the weight as it is in seven draws of ten; in the others, it moves the weight by integer multiples of "
        "2^(1−b) · max.",
    )
    return FigureResult(draw, (), notes)


def _graph(drawing: Drawing) -> None:
    """Draw w, b and R on the left, and their way through eq. 3 to the products on the right."""
    w, b, r = (drawing.height - down for down in (20, 58, 96))
    plus, cast = 268.0, 322.0

    def box(x: float, y: float, width: float, words: str, fill: int | None = None) -> None:
        inside = "none" if fill is None else theme().formats[fill]
        drawing.box(x, y - 9, width, 18, words, fill=inside, edge="quiet")

    box(8, w, 62, "w, FP32", 0)
    box(8, b, 62, "b, learned", 0)
    box(8, r, 62, "R, from seed", 0)
    box(112, b, 98, "2^(1−b) · max|w|")
    box(178, r, 32, "×")
    box(plus - 12, w, 24, "+")
    box(cast, w, 74, "cast to BF16", 2)
    box(cast, b, 74, "ŵ: products", 1)
    arrows = (
        ((70, w), (plus - 12, w)),
        ((150, w), (150, b + 9)),
        ((70, b), (112, b)),
        ((194, b - 9), (194, r + 9)),
        ((70, r), (178, r)),
        ((plus + 12, w), (cast, w)),
        ((cast + 37, w - 9), (cast + 37, b + 9)),
    )
    for start, end in arrows:
        drawing.arrow(start, end)
    drawing.line((210, plus), (r, r))
    drawing.arrow((plus, r), (plus, w - 9))
    drawing.text(cast - 40, r, "∂L/∂w = ∂L/∂ŵ", quiet=True)
    drawing.text(8, r - 22, "∂L/∂b = −ln 2 · 2^(1−b) · max|w| · Σ (∂L/∂ŵ · R) over the square", quiet=True)


# -------------------------------------------------------------------------------- matrices


def draw_matrices(rows: Sequence[Sequence[Shown]]) -> Figure:
    """Draw rows of up to four matrices, side by side."""
    height = SIDE * CELL + 34
    drawing = Drawing(len(rows) * height + 16)
    for i, row in enumerate(rows):
        for j, shown in enumerate(row):
            _matrix(drawing, GAP + j * (SIDE * CELL + GAP), drawing.height - 30 - i * height, shown)
    return drawing.figure


def _matrix(drawing: Drawing, left: float, top: float, of: Shown) -> None:
    drawing.text(left + SIDE * CELL / 2, top + 5, of.title, at="center", va="bottom", quiet=True)
    for (i, j), value in np.ndenumerate(of.values.numpy()):
        fill = theme().formats[1] if of.marked is not None and bool(of.marked[i, j]) else "none"
        x, y = left + j * CELL, top - (i + 1) * CELL
        drawing.box(x, y, CELL, CELL, _spelled(float(value)), fill=fill, edge="grid", line=0.7, size=SMALL - 1.6)
    high, wide = of.blocks
    for i in range(0, SIDE, high):
        for j in range(0, SIDE, wide):
            corner = (left + j * CELL, top - (i + high) * CELL)
            drawing.box(*corner, wide * CELL, high * CELL, edge="text", line=1.1)


def _spelled(value: float) -> str:
    """Return a number as short text, such as .36, −1.04 or .004."""
    if value == 0:
        return "0"
    text = f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.0e}" if abs(value) < 5e-4 else f"{value:.3f}"
    return text.replace("-", "−").replace("0.", ".")
