"""Draw what noise and casts do to small matrices (Figures 2, D.1 and C), with values that our kernels compute.

The values are computed from fixed seeds each time the figures are drawn. The paper does not give the numbers of its
matrices, but what the figures show does not depend on them. INT4 is the uniform grid of 0, ±1 … ±7 steps (E1M2); the
scale maps a block's largest magnitude to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.drawing import POINTS, SMALL, Drawing
from fewbits.analysis.figures.panels import panels
from fewbits.analysis.figures.theme import STYLES, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.gaussws.consistency import INT4, weights
from fewbits.analysis.studies.gaussws.theory import noise
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import Format
from fewbits.kernels.noise import sample_weight

SIDE, BLOCK, BITS, SEED = 4, 2, 4.0, 33  # the sides of a matrix and of a block, the bit width, the seed
CELL = 23.8  # the side of a cell in points
GAP = (POINTS - 4 * SIDE * CELL) / 5  # between four matrices in a row
Blocks = tuple[int, int]  # the rows and columns of a block


@dataclass(frozen=True)
class Shown:
    """A matrix to draw, with a number in each cell."""

    title: str
    values: Tensor
    blocks: Blocks = (SIDE, SIDE)  # the size of the blocks, which are outlined
    marked: Tensor | None = None  # true for the cells that are filled


# -------------------------------------------------------------------------------- Figure 2


@dataclass(frozen=True)
class Noisy:
    """A matrix w and the noise on it, before and after a cast Q."""

    w: Tensor
    noise: Tensor  # as the backward pass uses it
    cast: Tensor  # Q(w + noise)
    effective: Tensor  # the noise after the cast: Q(w + noise) − Q(w)

    @property
    def swallowed(self) -> Tensor:
        """True for the elements whose noise is not 0 before the cast, but 0 after it."""
        return (self.noise != 0) & (self.effective == 0)


def noisy(kind: str) -> Noisy:
    """Return a random matrix w, the kernel's noise for it, Q(w + noise), and the noise that the cast Q leaves.

    The noise that Q leaves is Q(w + noise) − Q(w). Q casts to INT4 with the block scales of w.

    kind: gaussian or uniform noise.
    """
    w = weights(SEED, (SIDE, SIDE))
    bits = torch.full((SIDE // BLOCK, SIDE // BLOCK), BITS)
    drawn: Literal["gaussian", "uniform"] = "gaussian" if kind == "gaussian" else "uniform"
    sampled = sample_weight(w, bits, SEED, noise=drawn, block=BLOCK, dtype=torch.float32)
    step = _maxima(w) / 7

    def cast(x: Tensor) -> Tensor:
        return fake_quantize(x / step * 0.5, INT4) * 2 * step  # E1M2 itself has steps of 0.5

    return Noisy(w, sampled - w, cast(sampled), cast(sampled) - cast(w))


def _maxima(w: Tensor) -> Tensor:
    blocks = w.abs().view(SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK).amax((1, 3))
    return blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


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
        f"A 4×4 normal matrix from a fixed seed, blocks of 2×2, {BITS:g} bits; the paper's values are not known.",
    )
    return FigureResult(lambda: draw_matrices(rows), (), notes)


# -------------------------------------------------------------------------------- Figure D.1


@figure("gaussws", "Figure D.1")
def figure_d1(results: Results) -> Picture:
    """Draw a weight as the forward and the backward pass quantize it, in blocks of one row and in square blocks.

    With blocks of one row the values differ between the passes; with square blocks they do not.
    """
    w = weights(SEED + 1, (SIDE, SIDE))
    kinds: tuple[tuple[str, Blocks], ...] = (("vectors of 2", (1, BLOCK)), ("squares of 2", (BLOCK, BLOCK)))
    rows, differing = [], []
    for name, (high, wide) in kinds:
        spelled = f"{INT4}:{high}x{wide}:amax"
        forward, backward = fake_quantize(w, spelled), fake_quantize(w, spelled, axis=0)
        rows.append(
            (
                Shown("W", w),
                Shown(f"backward, {name}", backward, (wide, high)),
                Shown(f"forward, {name}", forward, (high, wide)),
                Shown("difference", forward - backward, marked=forward != backward),
            )
        )
        differing.append(f"{name}: {int((forward != backward).sum())} of {w.numel()} values differ")
    notes = (
        f"{'; '.join(differing)}. The second row is our addition: square blocks of the same matrix.",
        "A 4×4 normal matrix from a fixed seed, in INT4 with FP32 scales (assumed); the paper's values are not known.",
    )
    return FigureResult(lambda: draw_matrices(rows), (), notes)


# -------------------------------------------------------------------------------- Figure 1's schematic

# The weight, as a fraction of its block's maximum, its bit width, and the number of draws of its noise.
WEIGHT, WIDTH_BITS, DRAWS = 0.62, 5.0, 1 << 16
SEEN = (WEIGHT - 0.2, WEIGHT + 0.2)  # the range of the axis of the sampled weight


@figure("gaussws", "Figure C", "Values that sampling gives to a weight, and the values of FP6 (Figure 1, left)")
def figure_c(results: Results) -> Picture:
    """Draw histograms of the noise R that the kernels draw, and of one weight plus scaled noise, over many draws."""
    values = {name: noise(kind, DRAWS, SEED).numpy() for name, kind in (("GaussWS", "gaussian"), ("DiffQ", "uniform"))}
    step = 2.0 ** (1 - WIDTH_BITS)
    form = Format.parse("e3m2")
    held = [v / form.max for v in form.values() if SEEN[0] < v / form.max < SEEN[1]]

    def draw() -> Figure:
        drawn, grid = panels(2, 2, 3.3)
        for (left, right), (name, r), style in zip(grid, values.items(), STYLES, strict=False):
            if name == "GaussWS":
                places, counts = np.unique(r, return_counts=True)
                left.bar(places, counts / DRAWS, 0.5, color=style.shade)
            else:
                left.hist(r, bins=32, range=(-0.5, 0.5), density=True, color=style.shade)
            left.set(title=f"R of {name}", xlim=(-2.6, 2.6), ylabel="probability" if name == "GaussWS" else "density")
            right.hist(WEIGHT + r * step, bins=200, range=SEEN, color=style.shade)
            right.set(title=f"w + R · 2^(1−b) · max, b = {WIDTH_BITS:g}", xlim=SEEN, yticks=[])
            for value in held:
                right.axvline(value, color=theme().quiet, linewidth=0.8, dashes=(2, 2))
            right.axvline(WEIGHT, color=theme().line, linewidth=1.2)
        grid[-1][1].set_xlabel("weight, in units of its block's maximum")
        return drawn

    notes = (
        f"{DRAWS:,} draws for one weight (solid line); dashed lines: values of FP6 E3M2. Rounded normal noise leaves "
        "the weight as it is in seven draws of ten; in the other draws, it moves the weight by integer multiples of "
        "2^(1−b) · max.",
    )
    return FigureResult(draw, (), notes)


# -------------------------------------------------------------------------------- details


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
