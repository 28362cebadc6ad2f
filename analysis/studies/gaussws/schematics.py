"""Draw what noise and casts do to small matrices (Figures 2, D.1) and how a weight is sampled (C).

Values are computed by our kernels from fixed seeds each time the figures are drawn. The paper does not give the numbers
of its matrices, but what the figures show does not depend on them. INT4 is the uniform grid of 0, ±1 … ±7 steps (E1M2).
"""

from __future__ import annotations

from collections.abc import Sequence
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
SQUARES = (BLOCK, BLOCK)
Shown = tuple[str, Tensor, Blocks, Tensor | None]  # a title, a matrix, its blocks, and true for the filled cells


class Noisy(NamedTuple):
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
    rows: list[Sequence[Shown]] = []
    counts = []
    for name, one in (("U(−½, ½)", noisy("uniform")), ("GaussWS", noisy("gaussian"))):
        lost = one.swallowed
        kept = ("Q(w + noise)", one.cast, SQUARES, None), ("noise left", one.effective, SQUARES, lost)
        rows.append((("w", one.w, SQUARES, None), (f"noise, {name}", one.noise, SQUARES, lost), *kept))
        of = f"{int(lost.sum())} of {int((one.noise != 0).sum())}"
        counts.append(f"{name}: the cast swallows {of} nonzero values of noise")
    notes = (
        f"{'; '.join(counts)} (marked). The second row is our addition: rounded normal noise on the same matrix.",
        f"{SOURCE} Blocks of 2×2, {BITS:g} bits.",
    )
    return FigureResult(lambda: draw_matrices(rows), (), notes)


@figure("gaussws", "Figure D.1")
def figure_d1(results: Results) -> Picture:
    """Draw a weight as the forward and the backward pass quantize it, in blocks of one row and in square blocks."""
    w, whole = weights(SEED + 1, (SIDE, SIDE)), (SIDE, SIDE)
    rows: list[Sequence[Shown]] = []
    counts = []
    for name, high in (("vectors", 1), ("squares", BLOCK)):
        spelled = f"{INT4}:{high}x{BLOCK}:amax"
        forward, backward = fake_quantize(w, spelled), fake_quantize(w, spelled, axis=0)
        passes = (
            (f"backward, {name}", backward, (BLOCK, high), None),
            (f"forward, {name}", forward, (high, BLOCK), None),
        )
        rows.append((("W", w, whole, None), *passes, ("difference", forward - backward, whole, forward != backward)))
        counts.append(f"{name} of 2: {int((forward != backward).sum())} of {w.numel()} values differ")
    notes = (
        f"{'; '.join(counts)}. The second row is our addition: square blocks of the same matrix.",
        f"{SOURCE} INT4 with FP32 scales (assumed).",
    )
    return FigureResult(lambda: draw_matrices(rows), (), notes)


def draw_matrices(rows: Sequence[Sequence[Shown]]) -> Figure:
    side, height = SIDE * CELL, SIDE * CELL + 34
    drawing = Drawing(len(rows) * height + 16)
    for (i, j), _ in np.ndenumerate(np.empty((len(rows), 4))):
        (title, values, (high, wide), marked), left = rows[i][j], GAP + j * (side + GAP)
        top = drawing.height - 30 - i * height
        drawing.text(left + side / 2, top + 5, title, at="center", va="bottom", quiet=True)
        fills = np.where(torch.zeros_like(values) if marked is None else marked, theme().formats[1], "none").tolist()
        words = [[_spelled(value) for value in row] for row in values.tolist()]
        drawing.grid(left, top, (CELL, CELL), words, fills, edge="grid", line=0.7, size=SMALL - 1.6)
        drawing.grid(
            left, top, (wide * CELL, high * CELL), [[""] * (SIDE // wide)] * (SIDE // high), edge="text", line=1.1
        )
    return drawing.figure


def _spelled(value: float) -> str:
    """Return a number as short text, such as .36, −1.04 or .004."""
    if value == 0:
        return "0"
    text = f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.0e}" if abs(value) < 5e-4 else f"{value:.3f}"
    return text.replace("-", "−").replace("0.", ".")


# -------------------------------------------------------------------------------- Figure C: Figure 1's schematic

# The weight, as a fraction of its block's maximum, its bit width, and the number of draws of its noise.
WEIGHT, WIDTH_BITS, DRAWS = 0.62, 5.0, 1 << 16
SEEN = (WEIGHT - 0.2, WEIGHT + 0.2)  # the range of the axis of the sampled weight
GRAPH, BELOW = 128.0, 240.0  # the heights of the computation graph and of the histograms, in points
ROWS = (20, 58, 96)  # the distances of the graph's rows from the top
# The boxes of the graph: left edge, row, width, text, and fill as an index into Theme.formats (−1: none).
BOXES = (
    *((8, 0, 62, "w, FP32", 0), (8, 1, 62, "b, learned", 0), (8, 2, 62, "R, from seed", 0)),
    *((112, 1, 98, "2^(1−b) · max|w|", -1), (178, 2, 32, "×", -1), (256, 0, 24, "+", -1)),
    *((322, 0, 74, "cast to BF16", 2), (322, 1, 74, "ŵ: products", 1)),
)
# The arrows of the graph: (x, distance from the top) of the start and of the end.
ARROWS = (
    *(((70, 20), (256, 20)), ((70, 58), (112, 58)), ((70, 96), (178, 96)), ((280, 20), (322, 20))),
    *(((150, 20), (150, 49)), ((194, 67), (194, 87)), ((359, 29), (359, 49)), ((268, 96), (268, 29))),
)


@figure("gaussws", "Figure C", "How a weight is sampled, and the values that it gets beside FP6's (Figure 1a)")
def figure_c(results: Results) -> Picture:
    """Draw the computation of a sampled weight, and below it histograms of R and of one weight plus scaled noise."""
    values = {name: noise(kind, DRAWS, SEED).numpy() for name, kind in (("GaussWS", "gaussian"), ("DiffQ", "uniform"))}
    form = Format.parse("e3m2")
    held = [v / form.max for v in form.values() if SEEN[0] < v / form.max < SEEN[1]]

    def draw() -> Figure:
        drawing, top = Drawing(GRAPH + BELOW), GRAPH + BELOW
        for x, row, wide, words, fill in BOXES:
            inside = "none" if fill < 0 else theme().formats[fill]
            drawing.box(x, top - ROWS[row] - 9, wide, 18, words, fill=inside, edge="quiet")
        for (x, down), (end, below) in ARROWS:
            drawing.arrow((x, top - down), (end, top - below))
        drawing.line((210, 268), (top - ROWS[2], top - ROWS[2]))
        drawing.text(282, top - ROWS[2], "∂L/∂w = ∂L/∂ŵ", quiet=True)
        drawing.text(8, top - 118, "∂L/∂b = −ln 2 · 2^(1−b) · max|w| · Σ (∂L/∂ŵ · R) over the square", quiet=True)
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
