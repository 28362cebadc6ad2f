"""Figure C: error and bias of a block's greatest value, computed with our kernels.

The scale of a block is rounded, too: to E4M3 or to a power of two. If it is rounded up, the block does not use the top
of E2M1's range. If it is rounded down, the block's greatest value is clipped to 6; only then is stochastic rounding
biased. Whether a scale is rounded up or down depends on the position of the greatest value between two powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.curves import Line, Panel, Rule, curve_figure
from fewbits.analysis.figures.theme import STYLES, Array, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.quantizer import Quantizer

PLACES, BLOCKS = 128, 1024  # the number of greatest values between 1 and 2, and the number of blocks with each of them
SEED = 5


@dataclass(frozen=True)
class Kind:
    """A quantizer of E2M1 elements, with its label and style in the figure."""

    label: str
    spelled: str
    style: Style


KINDS = (
    Kind("NVFP4", "e2m1:1x16:nvfp4", STYLES[0]),
    Kind("Four Over Six", "e2m1:1x16:fouroversix", STYLES[3]),
    Kind("MXFP4, rounded up", "e2m1:1x32:e8m0", STYLES[1]),
    Kind("MXFP4 of OCP", "e2m1:1x32:mx", STYLES[2]),
)


@dataclass(frozen=True)
class Maxima:
    """Mean relative errors of blocks' greatest values after quantization.

    Element i is the mean over the blocks whose greatest value is `places()[i]`.
    """

    error: Array  # the mean magnitude of the error of rounding to nearest
    bias: Array  # the mean error of stochastic rounding


def places() -> Tensor:
    """Return PLACES numbers between 1 and 2 with evenly spaced logarithms: the greatest values of the tested blocks."""
    return torch.exp2((torch.arange(PLACES) + 0.5) / PLACES)


@cache
def maxima(spelled: str) -> Maxima:
    """Return a quantizer's errors on blocks of normally distributed values.

    Each block is multiplied by a number so that its greatest value is one of `places()`. spelled: the quantizer, as
    text.
    """
    q = Quantizer.parse(spelled)
    width = q.block.cols
    assert width is not None
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(PLACES, BLOCKS, width, generator=generator)
    wanted = places()[:, None, None]
    greatest = x.abs().argmax(-1, keepdim=True)
    x = x / x.gather(-1, greatest) * wanted
    # A further row contains the tensor's greatest value, so that the tensor's scale does not depend on the blocks.
    x = torch.cat([x.view(-1, width), torch.full((1, width), 16.0)])

    def relative(spec: Quantizer | str) -> Tensor:
        back = fake_quantize(x, spec, seed=SEED)[:-1].view(PLACES, BLOCKS, width)
        return ((back.gather(-1, greatest) - wanted) / wanted).squeeze(-1)

    nearest, stochastic = relative(q), relative(f"{spelled}:stochastic")
    return Maxima(nearest.abs().mean(-1).double().numpy(), stochastic.mean(-1).double().numpy())


@figure("nvfp4", "Figure C", "The greatest value of a block")
def figure_c(results: Results) -> Picture:
    """Draw the mean error of a block's greatest value with rounding to nearest, and its bias with stochastic rounding.

    The error and the bias are drawn over the greatest value, which is between 1 and 2.
    """
    found = {kind: maxima(kind.spelled) for kind in KINDS}

    def draw() -> Figure:
        x = places().double().numpy()
        errors = tuple(Line(x, one.error, kind.style, kind.label) for kind, one in found.items())
        biases = tuple(Line(x, one.bias, kind.style, kind.label) for kind, one in found.items())
        label = "the block's greatest magnitude, as a multiple of a power of two"
        above = Panel("Rounded to nearest: relative error, %", errors, y_axis="percent", y_limits=(0, None))
        below = Panel(
            "Rounded stochastically: mean of the relative error, %",
            biases,
            (Rule(0, "text"),),
            x_label=label,
            y_axis="change",
        )
        return curve_figure([[above], [below]], height=4.4, sharex=True)

    each = "; ".join(f"{kind.label} {_mean(one.error)} and {_mean(one.bias)}" for kind, one in found.items())
    notes = (
        f"Computed by the kernels on {BLOCKS} blocks of normally distributed values for each of {PLACES} positions in "
        f"a binade. Mean error and mean bias over the binade: {each}.",
    )
    return FigureResult(draw, (), notes)


def _mean(values: Array) -> str:
    return f"{round(100 * float(values.mean()), 1) + 0.0:g} %".replace("-", "−")
