"""Figures 2 to 4, drawn from the kernels themselves: every number in them is what they compute when it is drawn.

The tensors are small and made here from fixed seeds, magnitudes normal in their logarithm (heavy tails), since that is
what makes a decision worth showing: they are examples of how things work, and nothing of them was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from fewbits.analysis import heat, plots
from fewbits.analysis.frames import Results
from fewbits.analysis.mor.looks import THRESHOLD
from fewbits.analysis.plots import SMALL, WIDTH
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, Picture
from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import Mixture, Quantizer

POINTS = 72 * WIDTH
E4M3, E5M2, BF16_FILL = 0, 1, 2  # places of a theme's formats
NAMES = ("E4M3", "E5M2", "BF16")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# -------------------------------------------------------------------------------- Figure 2


@figure("mor", "Figure 2")
def figure_2(results: Results) -> Picture:
    """GAM on one small tensor under three partitions: exponents, errors, one decision each."""
    x = heavy_tailed(8, 8, deviation=4.0, seed=0)
    partitions = {"tensor": "tensor", "block, 4×4": "4x4", "channel": "channel"}

    def draw() -> Figure:
        height = 396.0
        picture, axes = plots.canvas(height / 72)
        amax, mantissa, exponent = group(x)
        axes.text(8, height - 14, f"max |x| = {amax:.4g}", va="center", fontsize=SMALL)
        axes.text(
            POINTS / 2,
            height - 14,
            f"448 / max |x| = {mantissa:.4f} · {two_to(exponent)}",
            ha="center",
            va="center",
            fontsize=SMALL,
        )
        axes.text(
            POINTS - 8,
            height - 14,
            f"kept for all: m = {mantissa:.4f}",
            ha="right",
            va="center",
            fontsize=SMALL,
            weight="bold",
        )
        heads = ("log |x|", "scale over m", "error of E4M3", "one decision")
        for left, words in zip(MAPS, heads, strict=True):
            axes.text(
                left + SIDE / 2, height - 34, words, ha="center", va="center", fontsize=SMALL, color=plots.theme().quiet
            )
        for i, (name, block) in enumerate(partitions.items()):
            _partition(axes, x, name, block, height - 64 - i * 116)
        return picture

    notes = (
        "An 8×8 tensor made for this figure, 64 magnitudes normal in their logarithm; the larger, the stronger its "
        "colour.",
    )
    return FigureResult(draw, (), notes)


SIDE = 88.0
MAPS = (8.0, 108.0, 208.0, 308.0)


def group(x: Tensor) -> tuple[float, float, int]:
    """The largest magnitude, and GAM's mantissa with the exponent of the whole tensor's own scale."""
    packed = encode(x, "e4m3:tensor:gam")
    assert packed.group_scales is not None
    assert packed.scales is not None
    return float(x.abs().max()), float(packed.group_scales[0]), int(packed.scales.flatten()[0]) - 127


def _partition(axes: Axes, x: Tensor, name: str, block: str, top: float) -> None:
    """A row of maps: values, exponents, errors and what they add up to."""
    theme, cell = plots.theme(), SIDE / x.shape[0]
    quantizer = Quantizer.parse(f"e4m3:{block}:gam")
    rows, columns = quantizer.block.resolve(x.shape)
    packed = encode(x, quantizer)
    assert packed.scales is not None
    _, each = fake_quantize(x, quantizer, stats="block")
    _, choice, whole = mix(x, f"{quantizer} @ error<{THRESHOLD} | bf16", stats=True)
    axes.text(MAPS[0], top + 4, f"{name}", va="bottom", fontsize=SMALL, weight="bold")
    shade, logs = heat.shades(), x.float().abs().log2()
    for (i, j), value in np.ndenumerate(((logs - logs.min()) / (logs.max() - logs.min())).numpy()):
        axes.add_patch(Rectangle((MAPS[0] + j * cell, top - (i + 1) * cell), cell, cell, facecolor=shade(value), lw=0))
    grid = packed.scales.reshape(each.error.shape)
    for (i, j), error in np.ndenumerate(each.error.numpy()):
        width, height = columns * cell, rows * cell
        x0, y0 = j * width, top - (i + 1) * height
        said = ("", two_to(int(grid[i, j]) - 127), f"{100 * error:.1f} %")
        for left, words in zip(MAPS[:3], said, strict=True):
            axes.add_patch(Rectangle((left + x0, y0), width, height, facecolor="none", edgecolor=theme.text, lw=0.8))
            axes.text(left + x0 + width / 2, y0 + height / 2, words, ha="center", va="center_baseline", fontsize=SMALL)
    taken = E4M3 if int(choice) == 0 else BF16_FILL
    axes.add_patch(Rectangle((MAPS[3], top - SIDE), SIDE, SIDE, facecolor=theme.formats[taken], linewidth=0))
    error, sign = float(whole.error), "<" if taken == E4M3 else "≥"
    lines = (f"Σ / {int(whole.nonzeros)} = {100 * error:.2f} %", f"{sign} {100 * THRESHOLD:g} %", NAMES[taken])
    for i, words in enumerate(lines):
        weight = "bold" if i == 2 else "normal"
        axes.text(
            MAPS[3] + SIDE / 2,
            top - SIDE * (0.27 + 0.23 * i),
            words,
            ha="center",
            va="center",
            fontsize=SMALL,
            weight=weight,
        )
    for left in MAPS[:3]:
        _arrow(axes, left + SIDE + 1, left + 99, top - SIDE / 2)


# -------------------------------------------------------------------------------- Figure 3


@figure("mor", "Figure 3")
def figure_3(results: Results) -> Picture:
    """Three-way decisions on the 128×128 blocks of two tensors, and the types in which their product is computed."""
    mixture = Mixture.parse(load_recipe("mor/three-way").fprop.x)
    rows, inner, columns = 3, 4, 3
    a = choices(rows, inner, mixture, seed=1)
    b = choices(inner, columns, mixture, seed=2)
    promoted = np.maximum(a[:, :, None], b[None, :, :])  # rows × inner × columns: the higher of the two types

    def draw() -> Figure:
        size, gap = 48.0, 18.0
        height = size * (rows + inner) + gap + 52
        picture, axes = plots.canvas(height / 72)
        left, top = (POINTS - size * (inner + columns) - gap) / 2, height - 26
        key_of(axes, (E4M3, E5M2, BF16_FILL), height - 12)
        below, right = top - size * inner - gap, left + size * inner + gap
        for grid, x, y in ((a, left, below), (b, right, top)):
            for (i, j), choice in np.ndenumerate(grid):
                _block(axes, x + j * size, y - (i + 1) * size, size, size, int(choice))
        for (i, k, j), choice in np.ndenumerate(promoted):
            strip = size / inner
            _block(axes, right + j * size, below - i * size - (k + 1) * strip, size, strip, int(choice))
        for i, j in np.ndindex(rows, columns):
            axes.add_patch(
                Rectangle(
                    (right + j * size, below - (i + 1) * size),
                    size,
                    size,
                    facecolor="none",
                    edgecolor=plots.theme().text,
                    linewidth=1.1,
                )
            )
        said = (
            (left + size * inner / 2, below + 8, "A: 3×4 blocks"),
            (right - 8, top - size * inner / 2, "B: 4×3 blocks"),
            (right + size * columns / 2, below - size * rows - 11, "A·B: four block products each, in the higher type"),
        )
        for x, y, words in said:
            side = "right" if words.startswith("B") else "center"
            axes.text(
                min(x, POINTS - 110) if words.startswith("A·B") else x,
                y,
                words,
                ha=side,
                va="center",
                fontsize=SMALL,
                color=plots.theme().quiet,
            )
        return picture

    parts = ", ".join(f"{(promoted == i).mean():.0%} in {name}" for i, name in enumerate(NAMES))
    notes = (
        f"Decided by {mixture} on tensors made for this figure, of 128×128 blocks whose magnitudes spread differently.",
        f"Of the {promoted.size} block products {parts}.",
    )
    return FigureResult(draw, (), notes)


def choices(rows: int, columns: int, mixture: Mixture, seed: int) -> np.ndarray:
    """What the mixture takes for each 128×128 block of a tensor; how far magnitudes spread differs between blocks."""
    generator = torch.Generator().manual_seed(seed)
    spread = 2.4 + 1.4 * torch.randn(rows, columns, generator=generator)
    deviation = spread.abs().repeat_interleave(128, 0).repeat_interleave(128, 1)
    x = _lognormal(128 * rows, 128 * columns, deviation, generator)
    return mix(x, mixture)[1].numpy().astype(int)


def _block(axes: Axes, x: float, y: float, width: float, height: float, choice: int) -> None:
    theme = plots.theme()
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=theme.formats[choice], edgecolor=theme.background, lw=0.6)
    )
    axes.text(x + width / 2, y + height / 2, NAMES[choice], ha="center", va="center_baseline", fontsize=SMALL)


# -------------------------------------------------------------------------------- Figure 4


@figure("mor", "Figure 4")
def figure_4(results: Results) -> Picture:
    """Values on their way through fake quantization, under GAM's scales and under powers of two."""
    x = heavy_tailed(2, 4, deviation=2.0, seed=3)
    shown = x[1, :3]  # of the block without the tensor's maximum, whose scale GAM makes of another's mantissa
    flows = [flow(x, f"e4m3:1x4:{scaling}") for scaling in ("gam", "e8m0")]

    def draw() -> Figure:
        stations = (
            "x in BF16",
            "times the scale",
            "cast: E4M3's code",
            "its value",
            "over the scale, FP32",
            "again in BF16",
            "error before, %",
            "error after, %",
        )
        step, left, column = 30.0, 122.0, 46.5
        height = step * len(stations) + 40
        picture, axes = plots.canvas(height / 72)
        theme = plots.theme()
        for side, (scaling, one) in enumerate(zip(("GAM", "E8M0"), flows, strict=True)):
            start = left + side * 3 * column
            axes.add_patch(
                Rectangle((start + 2, 6), 3 * column - 4, height - 14, facecolor="none", edgecolor=theme.grid, lw=0.9)
            )
            axes.text(
                start + 1.5 * column,
                height - 20,
                f"{scaling}: scale {one.scale:.6g}",
                ha="center",
                va="center",
                fontsize=SMALL,
                weight="bold",
            )
            for i, values in enumerate(one.stations):
                for j, words in enumerate(values):
                    moved = i == 5 and one.stations[4][j] != words
                    axes.text(
                        start + (j + 0.5) * column,
                        height - 48 - i * step,
                        words,
                        ha="center",
                        va="center",
                        fontsize=SMALL,
                        color=theme.line if moved else theme.text,
                        weight="bold" if moved else "normal",
                    )
        for i, words in enumerate(stations):
            y = height - 48 - i * step
            axes.text(left - 8, y, words, ha="right", va="center", fontsize=SMALL, color=theme.quiet)
            if i < 5:
                axes.add_patch(
                    FancyArrowPatch(
                        (12, y - 4),
                        (12, y - step + 5),
                        arrowstyle="-|>",
                        mutation_scale=6,
                        color=theme.quiet,
                        linewidth=0.8,
                    )
                )
        axes.plot([4, POINTS - 4], [height - 48 - 5.5 * step] * 2, color=theme.quiet, linewidth=0.8)
        return picture

    moved = sum(
        before != after for one in flows[:1] for before, after in zip(one.stations[4], one.stations[5], strict=True)
    )
    notes = (
        "Three values of a small block. Powers of two give E4M3's values back exactly; GAM's mantissa makes numbers of "
        f"more bits than BF16 has, so they are rounded once more on the way back ({moved} of {len(shown)} here).",
    )
    return FigureResult(draw, (), notes)


@dataclass(frozen=True)
class Flow:
    scale: float
    stations: tuple[tuple[str, ...], ...]


def flow(x: Tensor, spelling: str) -> Flow:
    """The second row's first three values at every station."""
    quantizer = Quantizer.parse(spelling)
    packed = encode(x, quantizer)
    assert packed.scales is not None
    code = int(packed.scales.flatten()[1])
    # GAM stores the exponent of the factor that encodes, E8M0 that of the one that decodes
    scale = (
        2.0 ** (code - 127) * float(packed.group_scales[0]) if packed.group_scales is not None else 2.0 ** (127 - code)
    )
    values, codes = x[1, :3].float(), packed.codes[1, :3].tolist()
    wide, back = fake_quantize(x.float(), quantizer)[1, :3], fake_quantize(x, quantizer)[1, :3].float()
    numbers: tuple[tuple[Sequence[float], Callable[[float], str]], ...] = (
        (values.tolist(), _short),
        ((values * scale).tolist(), _short),
        (codes, lambda n: f"0x{int(n):02x}"),
        ([quantizer.format.decode(n) for n in codes], _short),
        (wide.tolist(), _short),
        (back.tolist(), _short),
        ((100 * (wide - values) / values).abs().tolist(), lambda v: f"{v:.3f}"),
        ((100 * (back - values) / values).abs().tolist(), lambda v: f"{v:.3f}"),
    )
    return Flow(scale, tuple(tuple(spell(v) for v in row) for row, spell in numbers))


# -------------------------------------------------------------------------------- details


def heavy_tailed(rows: int, columns: int, *, deviation: float, seed: int) -> Tensor:
    """BF16, magnitudes log-normal: their binary logarithms have this standard deviation."""
    return _lognormal(rows, columns, deviation, torch.Generator().manual_seed(seed))


def _lognormal(rows: int, columns: int, deviation: float | Tensor, generator: torch.Generator) -> Tensor:
    sign = torch.randn(rows, columns, generator=generator).sign()
    return (sign * torch.exp2(deviation * torch.randn(rows, columns, generator=generator))).bfloat16()


def two_to(exponent: int) -> str:
    return "2" + str(exponent).translate(SUPERSCRIPTS)


def _short(value: float) -> str:
    return f"{value:.5g}".replace("-", "−")


def _arrow(axes: Axes, start: float, end: float, y: float) -> None:
    axes.add_patch(
        FancyArrowPatch(
            (start, y), (end, y), arrowstyle="-|>", mutation_scale=6, color=plots.theme().quiet, linewidth=0.8
        )
    )


def key_of(axes: Axes, formats: Sequence[int], y: float) -> None:
    for i, choice in enumerate(formats):
        x = 10 + 62 * i
        axes.add_patch(Rectangle((x, y - 5), 12, 10, facecolor=plots.theme().formats[choice], linewidth=0))
        axes.text(x + 17, y, NAMES[choice], va="center", fontsize=SMALL)
