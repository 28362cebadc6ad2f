"""Draw how MoR scales, chooses formats and rounds (Figures 2 to 4), with our kernels on small random tensors.

The tensors come from fixed seeds; they are not trained. Their magnitudes are log-normal (with heavy tails), because all
decisions would be the same for normally distributed values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.drawing import BF16, E4M3, E5M2, FORMATS, POINTS, Drawing
from fewbits.analysis.figures.theme import shades, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.tensors import THRESHOLD
from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import Mixture, Quantizer

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# -------------------------------------------------------------------------------- Figure 2

SIDE = 88.0  # the side of a map in points
MAPS = (8.0, 108.0, 208.0, 308.0)  # the left edges of maps
HEADS = ("log |x|", "scale over m", "error of E4M3", "one decision")


@figure("mor", "Figure 2")
def figure_2(results: Results) -> Picture:
    """Draw GAM's exponents, the errors and the decision for one small tensor, with three partitions into blocks."""
    x = heavy_tailed(8, 8, deviation=4.0, seed=0)
    partitions = {"tensor": "tensor", "block, 4×4": "4x4", "channel": "channel"}

    def draw() -> Figure:
        drawing = Drawing(396)
        amax, mantissa, exponent = group_scale(x)
        top = drawing.height - 14
        drawing.text(8, top, f"max |x| = {amax:.4g}")
        drawing.text(POINTS / 2, top, f"448 / max |x| = {mantissa:.4f} · {power_of_two(exponent)}", at="center")
        drawing.text(POINTS - 8, top, f"kept for all: m = {mantissa:.4f}", at="right", bold=True)
        for left, words in zip(MAPS, HEADS, strict=True):
            drawing.text(left + SIDE / 2, top - 20, words, at="center", quiet=True)
        for i, (name, block) in enumerate(partitions.items()):
            _partition(drawing, x, name, block, top - 50 - i * 116)
        return drawing.figure

    notes = (
        "An 8×8 tensor made for this figure, with log-normal magnitudes; larger magnitudes have a stronger colour.",
    )
    return FigureResult(draw, (), notes)


def group_scale(x: Tensor) -> tuple[float, float, int]:
    """Return the largest magnitude of x, and the mantissa and exponent of a GAM scale for the whole tensor."""
    packed = encode(x, "e4m3:tensor:gam")
    assert packed.group_scales is not None
    assert packed.scales is not None
    return float(x.abs().max()), float(packed.group_scales[0]), int(packed.scales.flatten()[0]) - 127


def _partition(drawing: Drawing, x: Tensor, name: str, block: str, top: float) -> None:
    """Draw the row of maps for one partition: values, exponents of scales, errors and the decision.

    name: the partition's label. block: its spelling in a quantizer. top: the upper edge of the maps.
    """
    cell = SIDE / x.shape[0]
    quantizer = Quantizer.parse(f"e4m3:{block}:gam")
    rows, columns = quantizer.block.resolve(x.shape)
    packed = encode(x, quantizer)
    assert packed.scales is not None
    _, each = fake_quantize(x, quantizer, stats="block")
    _, choice, whole = mix(x, f"{quantizer} @ error<{THRESHOLD} | bf16", stats=True)
    drawing.text(MAPS[0], top + 4, name, bold=True, va="bottom")
    shade, logs = shades(), x.float().abs().log2()
    for (i, j), value in np.ndenumerate(((logs - logs.min()) / (logs.max() - logs.min())).numpy()):
        drawing.box(MAPS[0] + j * cell, top - (i + 1) * cell, cell, cell, fill=shade(value))
    grid = packed.scales.reshape(each.error.shape)
    for (i, j), error in np.ndenumerate(each.error.numpy()):
        width, height = columns * cell, rows * cell
        words = ("", power_of_two(int(grid[i, j]) - 127), f"{100 * error:.1f} %")
        for left, text in zip(MAPS[:3], words, strict=True):
            drawing.box(left + j * width, top - (i + 1) * height, width, height, text, edge="text", line=0.8)
    taken = E4M3 if int(choice) == 0 else BF16
    drawing.box(MAPS[3], top - SIDE, SIDE, SIDE, fill=theme().formats[taken])
    error, sign = float(whole.error), "<" if taken == E4M3 else "≥"
    lines = (f"Σ / {int(whole.nonzeros)} = {100 * error:.2f} %", f"{sign} {100 * THRESHOLD:g} %", FORMATS[taken])
    for i, text in enumerate(lines):
        drawing.text(MAPS[3] + SIDE / 2, top - SIDE * (0.27 + 0.23 * i), text, at="center", bold=i == 2, zorder=3)
    for left in MAPS[:3]:
        drawing.arrow((left + SIDE + 1, top - SIDE / 2), (left + 99, top - SIDE / 2))


# -------------------------------------------------------------------------------- Figure 3


@figure("mor", "Figure 3")
def figure_3(results: Results) -> Picture:
    """Draw the formats that three-way MoR chooses for the blocks of two matrices A and B, and those of A·B.

    A block of A·B is a sum of products of two blocks; each product is drawn in the wider format of its two blocks.
    """
    mixture = Mixture.parse(load_recipe("mor/three-way").fprop.x)
    rows, inner, columns = 3, 4, 3
    a = choices(rows, inner, mixture, seed=1)
    b = choices(inner, columns, mixture, seed=2)
    promoted = np.maximum(a[:, :, None], b[None, :, :])  # (rows, inner, columns): the wider of the two formats

    def draw() -> Figure:
        size, gap = 48.0, 18.0
        drawing = Drawing(size * (rows + inner) + gap + 52)
        left, top = (POINTS - size * (inner + columns) - gap) / 2, drawing.height - 26
        drawing.format_key((E4M3, E5M2, BF16), drawing.height - 12)
        below, right = top - size * inner - gap, left + size * inner + gap

        def block(x: float, y: float, height: float, choice: int) -> None:
            drawing.box(x, y, size, height, FORMATS[choice], fill=theme().formats[choice], edge="background", line=0.6)

        for grid, x, y in ((a, left, below), (b, right, top)):
            for (i, j), choice in np.ndenumerate(grid):
                block(x + j * size, y - (i + 1) * size, size, int(choice))
        strip = size / inner
        for (i, k, j), choice in np.ndenumerate(promoted):
            block(right + j * size, below - i * size - (k + 1) * strip, strip, int(choice))
        for i, j in np.ndindex(rows, columns):
            drawing.box(right + j * size, below - (i + 1) * size, size, size, edge="text", line=1.1)
        drawing.text(left + size * inner / 2, below + 8, "A: 3×4 blocks", at="center", quiet=True)
        drawing.text(right - 8, top - size * inner / 2, "B: 4×3 blocks", at="right", quiet=True)
        words = "A·B: four products in each block, in the higher type"
        drawing.text(POINTS - 110, below - size * rows - 11, words, at="center", quiet=True)
        return drawing.figure

    parts = ", ".join(f"{(promoted == i).mean():.0%} in {name}" for i, name in enumerate(FORMATS))
    notes = (
        f"Decisions of {mixture} for tensors made for this figure. The spread of magnitudes differs between their "
        "128×128 blocks.",
        f"Shares of the {promoted.size} block products: {parts}.",
    )
    return FigureResult(draw, (), notes)


def choices(rows: int, columns: int, mixture: Mixture, seed: int) -> np.ndarray:
    """Return the index of the quantizer that the mixture chooses for each 128×128 block of a random tensor.

    The tensor has rows × columns blocks, which differ in the spread of their magnitudes.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = 2.4 + 1.4 * torch.randn(rows, columns, generator=generator)
    deviation = spread.abs().repeat_interleave(128, 0).repeat_interleave(128, 1)
    x = _lognormal(128 * rows, 128 * columns, deviation, generator)
    return mix(x, mixture)[1].numpy().astype(int)


# -------------------------------------------------------------------------------- Figure 4

STATIONS = (  # the labels of the steps of fake quantization, from top to bottom
    "x in BF16",
    "times the scale",
    "cast: E4M3's code",
    "its value",
    "over the scale, FP32",
    "again in BF16",
    "error before, %",
    "error after, %",
)
FP32, AGAIN = 4, 5  # the indices of the steps before and after the second rounding


@dataclass(frozen=True)
class Flow:
    """Three values of a tensor at each step of fake quantization; STATIONS has the labels of the steps."""

    scale: float
    stations: tuple[tuple[str, ...], ...]  # by step and value, as text

    def moved(self, value: int) -> bool:
        """Tell whether rounding to BF16 after the division by the scale changed the value with this index."""
        return self.stations[FP32][value] != self.stations[AGAIN][value]


@figure("mor", "Figure 4")
def figure_4(results: Results) -> Picture:
    """Draw three values at each step of fake quantization, with a GAM scale and with a power of two as scale."""
    x = heavy_tailed(2, 4, deviation=2.0, seed=3)
    flows = {name: flow(x, f"e4m3:1x4:{scaling}") for name, scaling in (("GAM", "gam"), ("E8M0", "e8m0"))}

    def draw() -> Figure:
        step, left, column = 30.0, 122.0, 46.5
        drawing = Drawing(step * len(STATIONS) + 40)
        first = drawing.height - 48
        for side, (scaling, one) in enumerate(flows.items()):
            start = left + side * 3 * column
            drawing.box(start + 2, 6, 3 * column - 4, drawing.height - 14, edge="grid")
            words = f"{scaling}: scale {one.scale:.6g}"
            drawing.text(start + 1.5 * column, drawing.height - 20, words, at="center", bold=True)
            for i, values in enumerate(one.stations):
                for j, text in enumerate(values):
                    moved = i == AGAIN and one.moved(j)
                    colour = theme().line if moved else ""
                    x0 = start + (j + 0.5) * column
                    drawing.text(x0, first - i * step, text, at="center", bold=moved, color=colour, zorder=3)
        for i, words in enumerate(STATIONS):
            y = first - i * step
            drawing.text(left - 8, y, words, at="right", quiet=True)
            if i < AGAIN:
                drawing.arrow((12, y - 4), (12, y - step + 5))
        drawing.line([4, POINTS - 4], [first - (AGAIN + 0.5) * step] * 2)
        return drawing.figure

    moved = sum(map(flows["GAM"].moved, range(3)))
    notes = (
        "Three values of a small block. Dividing values of E4M3 by a power of two is exact in BF16. Dividing them by "
        "GAM's scale gives numbers with more bits than BF16 has, so they are rounded a second time "
        f"({moved} of 3 change here).",
    )
    return FigureResult(draw, (), notes)


def flow(x: Tensor, spelling: str) -> Flow:
    """Return the first three values of the second row of x at every step of fake quantization.

    spelling: the quantizer, as text. The maximum of x has to be in another row, so that GAM's mantissa is not computed
    from a value of this row.
    """
    quantizer = Quantizer.parse(spelling)
    packed = encode(x, quantizer)
    assert packed.scales is not None
    code = int(packed.scales.flatten()[1])
    # GAM stores the exponent of the encoding factor, E8M0 that of the decoding factor
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
    """Return a BF16 tensor x with random signs, in which log2 |x| is normally distributed with mean 0.

    deviation: the standard deviation of log2 |x|.
    """
    return _lognormal(rows, columns, deviation, torch.Generator().manual_seed(seed))


def _lognormal(rows: int, columns: int, deviation: float | Tensor, generator: torch.Generator) -> Tensor:
    sign = torch.randn(rows, columns, generator=generator).sign()
    return (sign * torch.exp2(deviation * torch.randn(rows, columns, generator=generator))).bfloat16()


def power_of_two(exponent: int) -> str:
    """Return 2 to this exponent as text with a superscript, for example 2⁻³."""
    return "2" + str(exponent).translate(SUPERSCRIPTS)


def _short(value: float) -> str:
    return f"{value:.5g}".replace("-", "−")
