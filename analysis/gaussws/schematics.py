"""Figures 2 and D.1, drawn from the kernels themselves: small matrices from fixed seeds, every number computed anew.

The paper does not give its matrices; what they show does not depend on them. INT4 is the even grid of 0, ±1 … ±7 steps
(E1M2), a block's largest magnitude at 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from fewbits.analysis import plots
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.gaussws.consistency import INT4, weights
from fewbits.analysis.gaussws.theory import noise
from fewbits.analysis.plots import SMALL, WIDTH
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, Picture
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import Format
from fewbits.kernels.noise import sample_weight

POINTS = 72 * WIDTH
SIDE, BLOCK, BITS, SEED = 4, 2, 4.0, 33
CELL = 23.8
GAP = (POINTS - 4 * SIDE * CELL) / 5


# -------------------------------------------------------------------------------- Figure 2


@dataclass(frozen=True)
class Noisy:
    """One matrix on its way through noise and cast."""

    w: Tensor
    noise: Tensor  # what backward sees
    cast: Tensor  # Q(w + noise)
    effective: Tensor  # what is left of the noise: Q(w + noise) − Q(w)

    @property
    def swallowed(self) -> Tensor:
        return (self.noise != 0) & (self.effective == 0)


def noisy(kind: str) -> Noisy:
    """ŵ of the kernel in float32, then cast to INT4 on the grids of w's own blocks."""
    w = weights(SEED, (SIDE, SIDE))
    bits = torch.full((SIDE // BLOCK, SIDE // BLOCK), BITS)
    gaussian = kind == "gaussian"
    sampled = sample_weight(
        w, bits, SEED, noise="gaussian" if gaussian else "uniform", block=BLOCK, dtype=torch.float32
    )
    step = _maxima(w) / 7

    def cast(x: Tensor) -> Tensor:
        return fake_quantize(x / step * 0.5, INT4) * 2 * step  # E1M2's own steps are halves

    return Noisy(w, sampled - w, cast(sampled), cast(sampled) - cast(w))


def _maxima(w: Tensor) -> Tensor:
    blocks = w.abs().view(SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK).amax((1, 3))
    return blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@figure("gaussws", "Figure 2")
def figure_2(results: Results) -> Picture:
    rows = {"U(−½, ½)": noisy("uniform"), "GaussWS": noisy("gaussian")}

    def draw() -> Figure:
        height = 2 * (SIDE * CELL + 34) + 16
        picture, axes = plots.canvas(height / 72)
        for i, (name, one) in enumerate(rows.items()):
            top = height - 30 - i * (SIDE * CELL + 34)
            columns = ("w", f"noise, {name}", "Q(w + noise)", "noise left")
            for j, (words, values) in enumerate(zip(columns, (one.w, one.noise, one.cast, one.effective), strict=True)):
                left = GAP + j * (SIDE * CELL + GAP)
                marked = one.swallowed if j in (1, 3) else None
                matrix(axes, left, top, values, words, blocks=(BLOCK, BLOCK), marked=marked)
        return picture

    counts = {name: (int(one.swallowed.sum()), int((one.noise != 0).sum())) for name, one in rows.items()}
    notes = (
        "; ".join(
            f"{name}: {gone} of {there} that are not zero are swallowed" for name, (gone, there) in counts.items()
        )
        + " (marked). The second row is ours: rounded normal noise on the same matrix.",
        f"A 4×4 normal matrix from a fixed seed, blocks of 2×2, {BITS:g} bits; the paper's own values are not known.",
    )
    return FigureResult(draw, (), notes)


# -------------------------------------------------------------------------------- Figure D.1


@figure("gaussws", "Figure D.1")
def figure_d1(results: Results) -> Picture:
    w = weights(SEED + 1, (SIDE, SIDE))
    rows: dict[str, tuple[Tensor, Tensor]] = {
        name: (fake_quantize(w, f"{INT4}:{block}:amax"), fake_quantize(w, f"{INT4}:{block}:amax", axis=0))
        for name, block in (("vectors of 2", "1x2"), ("squares of 2", "2x2"))
    }
    sides: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
        "vectors of 2": ((1, BLOCK), (BLOCK, 1)),
        "squares of 2": ((BLOCK, BLOCK), (BLOCK, BLOCK)),
    }

    def draw() -> Figure:
        height = 2 * (SIDE * CELL + 34) + 16
        picture, axes = plots.canvas(height / 72)
        for i, (name, (forward, backward)) in enumerate(rows.items()):
            top = height - 30 - i * (SIDE * CELL + 34)
            along, down = sides[name]
            shown: tuple[tuple[str, Tensor, tuple[int, int] | None, Tensor | None], ...] = (
                ("W", w, None, None),
                (f"backward, {name}", backward, down, None),
                (f"forward, {name}", forward, along, None),
                ("difference", forward - backward, None, forward != backward),
            )
            for j, (words, values, blocks, marked) in enumerate(shown):
                matrix(axes, GAP + j * (SIDE * CELL + GAP), top, values, words, blocks=blocks, marked=marked)
        return picture

    parted = {name: int((forward != backward).sum()) for name, (forward, backward) in rows.items()}
    notes = (
        "; ".join(f"{name}: {count} of {w.numel()} values differ" for name, count in parted.items())
        + ". The second row is ours: squares of the same matrix.",
        "A 4×4 normal matrix from a fixed seed, INT4, FP32 scales (assumed); the paper's own values are not known.",
    )
    return FigureResult(draw, (), notes)


# -------------------------------------------------------------------------------- Figure 1's schematic

WEIGHT, WIDTH_BITS, DRAWS = 0.62, 5.0, 1 << 16  # in units of its block's maximum


@figure("gaussws", "Figure C", "Where sampling takes a weight, among what BF16 and FP6 hold (Figure 1, left)")
def figure_c(results: Results) -> Picture:
    """One weight, drawn many times by the kernels: what its noise is, and where ŵ lies."""
    values = {name: noise(kind, DRAWS, SEED) for name, kind in (("GaussWS", "gaussian"), ("DiffQ", "uniform"))}
    step = 2.0 ** (1 - WIDTH_BITS)
    grid = np.array([v for v in Format.parse("e3m2").values() if 0 <= v <= Format.parse("e3m2").max])
    grid = grid / grid.max()

    def draw() -> Figure:
        picture, panels = plots.panels(2, 2, 3.3)
        for row, (name, r) in zip(panels, values.items(), strict=True):
            look = plots.LOOKS[0 if name == "GaussWS" else 1]
            axes = row[0]
            axes.set_title(f"R of {name}")
            if name == "GaussWS":
                places, counts = np.unique(r.numpy(), return_counts=True)
                axes.bar(places, counts / DRAWS, 0.5, color=look.shade)
            else:
                axes.hist(r.numpy(), bins=32, range=(-0.5, 0.5), density=True, color=look.shade)
            axes.set(xlim=(-2.6, 2.6), ylabel="probability" if name == "GaussWS" else "density")
            axes = row[1]
            axes.set_title(f"w + R · 2^(1−b) · max, b = {WIDTH_BITS:g}")
            axes.hist((WEIGHT + r * step).numpy(), bins=200, range=(WEIGHT - 0.2, WEIGHT + 0.2), color=look.shade)
            for value in grid[(grid > WEIGHT - 0.2) & (grid < WEIGHT + 0.2)]:
                axes.axvline(value, color=plots.theme().quiet, linewidth=0.8, dashes=(2, 2))
            axes.axvline(WEIGHT, color=plots.theme().line, linewidth=1.2)
            axes.set(xlim=(WEIGHT - 0.2, WEIGHT + 0.2), yticks=[])
        panels[-1][1].set_xlabel("weight, in units of its block's maximum")
        return picture

    notes = (
        f"{DRAWS:,} draws of one weight (upright line); dashed: what FP6 E3M2 holds. Rounded normal noise keeps the "
        "weight in seven draws of ten, and else moves it by whole multiples of 2^(1−b) of the maximum.",
    )
    return FigureResult(draw, (), notes)


# -------------------------------------------------------------------------------- details


def matrix(
    axes: Axes,
    left: float,
    top: float,
    values: Tensor,
    title: str,
    *,
    blocks: tuple[int, int] | None = None,
    marked: Tensor | None = None,
) -> None:
    """Numbers in their cells, blocks in bold outline, marked cells in colour."""
    theme = plots.theme()
    rows, columns = values.shape
    axes.text(left + columns * CELL / 2, top + 5, title, ha="center", va="bottom", fontsize=SMALL, color=theme.quiet)
    for (i, j), value in np.ndenumerate(values.numpy()):
        fill = theme.formats[1] if marked is not None and bool(marked[i, j]) else "none"
        corner = (left + j * CELL, top - (i + 1) * CELL)
        axes.add_patch(Rectangle(corner, CELL, CELL, facecolor=fill, edgecolor=theme.grid, linewidth=0.7))
        x, y = corner[0] + CELL / 2, corner[1] + CELL / 2
        axes.text(x, y, _spelled(float(value)), ha="center", va="center_baseline", fontsize=SMALL - 1.6)
    high, wide = blocks or (rows, columns)
    for i in range(0, rows, high):
        for j in range(0, columns, wide):
            axes.add_patch(
                Rectangle(
                    (left + j * CELL, top - (i + high) * CELL),
                    *(wide * CELL, high * CELL),
                    facecolor="none",
                    edgecolor=theme.text,
                    linewidth=1.1,
                )
            )


def _spelled(value: float) -> str:
    """In as few letters as it takes: .36, −1.04, .004."""
    if value == 0:
        return "0"
    text = f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.0e}" if abs(value) < 5e-4 else f"{value:.3f}"
    return text.replace("-", "−").replace("0.", ".")
