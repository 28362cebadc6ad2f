"""Draw three effects: of rotation on outliers, of stochastic rounding on bias and variance, of accumulators on sums.

A rotation is a Hadamard transform. The figures need no training; their numbers are drawn from fixed seeds.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.curves import Line, Panel, draw_panel, keys
from fewbits.analysis.figures.panels import legend, panels
from fewbits.analysis.figures.theme import BASELINE, NOISE, QUIET, SMALL, STYLES
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.primer import blocks, sums
from fewbits.kernels.api import fake_quantize

# -------------------------------------------------------------------------------- rotation

BINS = np.linspace(0, 16, 65)
FACTORS = (1, 2, 4, 8, 16, 32, 64, 128)
TYPICAL = 16  # the factor of the outliers in the left panel
ROTATED_CASTS = {"one scale": "e2m1:tensor:amax", "NVFP4": "e2m1:1x16:nvfp4"}


@figure("primer", "Figure R", title="A Hadamard transform of 16 values, and outliers")
def rotation(results: Results) -> Picture:
    """Draw histograms of magnitudes before and after a Hadamard transform, and errors of casts to E2M1.

    The tensors have normally distributed numbers, of which 0.1 %, the outliers, are multiplied by a factor. The errors
    are drawn against this factor.
    """
    x = blocks.with_outliers(TYPICAL)
    looks = {"before": STYLES[1], "rotated": STYLES[0], "normal numbers": NOISE}
    shares = {
        "before": _shares(x),
        "rotated": _shares(blocks.rotated(x)),
        "normal numbers": _shares(blocks.with_outliers(1)),
    }
    centres = (BINS[1:] + BINS[:-1]) / 2
    histogram = Panel(
        f"Share of the elements, outliers × {TYPICAL}",
        tuple(
            Line(centres[share > 0], share[share > 0], looks[name], name, points=False)
            for name, share in shares.items()
        ),
        x_label="magnitude, in medians",
    )
    errors = {
        (title, name): np.array(
            [blocks.error(_outlier_tensor(factor, rotated=name == "rotated"), spec) for factor in FACTORS]
        )
        for title, spec in ROTATED_CASTS.items()
        for name in ("before", "rotated")
    }
    factors = np.array(FACTORS, float)
    cast = Panel(
        "Relative squared error of E2M1",
        tuple(Line(factors, error, looks[name]) for (_, name), error in errors.items()),
        x_label="factor of the outliers",
    )

    def draw() -> Figure:
        figure, [row] = panels(1, 2, 2.9)
        for axes, panel in zip(row, (histogram, cast), strict=True):
            draw_panel(axes, panel)
            axes.set_yscale("log")
        row[1].set_xscale("log", base=2)
        row[1].minorticks_off()
        row[1].set_xticks(factors, [f"{factor:g}" for factor in factors])
        for title, height in (("one scale", 1.15), ("NVFP4", 1.25)):
            last = max(errors[title, name][4] for name in ("before", "rotated"))
            row[1].text(16, last * height, title, ha="center", va="bottom", fontsize=SMALL)
        row[1].set_ylim(top=1.5)
        legend(figure, keys([histogram]))
        return figure

    at = FACTORS.index(TYPICAL)
    pairs = "; ".join(
        f"{title}: {errors[title, 'before'][at]:.2g} before and {errors[title, 'rotated'][at]:.2g} after"
        for title in ROTATED_CASTS
    )
    helped = {
        title: [f for f, a, b in zip(FACTORS, errors[title, "before"], errors[title, "rotated"], strict=True) if b < a]
        for title in ROTATED_CASTS
    }
    ranges = "; ".join(f"{title}: {_list(found)}" for title, found in helped.items())
    notes = (
        f"Normal numbers, 0.1 % of which are multiplied by a factor. Errors with outliers × {TYPICAL}, {pairs}.",
        f"The factors for which the transform makes the error smaller are, {ranges}. The transform spreads an outlier "
        "over 16 values: then a scale for the whole tensor can be smaller. A block of 16 stores one outlier well "
        "without the transform.",
    )
    return FigureResult(draw, (), notes)


def _outlier_tensor(factor: float, *, rotated: bool) -> torch.Tensor:
    """Return the tensor `blocks.with_outliers(factor)`; if `rotated`, after a Hadamard transform.

    The tensor has normally distributed numbers, 0.1 % of which are multiplied by `factor`.
    """
    x = blocks.with_outliers(factor)
    return blocks.rotated(x).float() if rotated else x


def _list(factors: list[int]) -> str:
    return ", ".join(map(str, factors)) or "none"


def _shares(x: torch.Tensor) -> np.ndarray:
    """Return a histogram of |x| / median |x|: for each bin, the share of the elements of x that are in it.

    BINS has the edges of the bins. Elements beyond the last edge count in the last bin.
    """
    scaled = (x.abs() / x.abs().median()).clamp(max=float(BINS[-1])).flatten().numpy()
    return np.histogram(scaled, BINS)[0] / scaled.size


# -------------------------------------------------------------------------------- stochastic rounding

DRAWS = 256  # the number of stochastic roundings of each input in the left panel
POINT = (1.0, 2.0)  # the range of the inputs in the left panel: two steps of E2M1


@figure("primer", "Figure N", title="Bias and variance of stochastic rounding")
def stochastic(results: Results) -> Picture:
    """Draw rounded against unrounded numbers, and the error of the mean of n stochastic roundings against n."""
    inputs = np.linspace(*POINT, 65)
    x = torch.tensor(inputs, dtype=torch.float32).repeat(DRAWS, 1)
    drawn = fake_quantize(x, "e2m1:stochastic", seed=1).double().numpy()
    nearest = fake_quantize(x[:1], "e2m1").double().numpy()[0]
    mean, spread = drawn.mean(0), drawn.std(0)
    left = Panel(
        "Rounded to E2M1",
        (
            Line(inputs, nearest, STYLES[1], "nearest", points=False),
            Line(inputs, mean, STYLES[0], "stochastic: mean ± deviation", (mean - spread, mean + spread), points=False),
            Line(inputs, inputs, QUIET, "the number itself", points=False, secondary=True),
        ),
        x_label="number",
    )
    counts = np.array([1, 2, 4, 8, 16, 32, 64, 128], float)
    of_mean = np.array([blocks.error_of_mean(int(n)) for n in counts])
    bias = blocks.error_of_mean(0)
    right = Panel(
        "Error of the mean of n roundings",
        (
            Line(counts, np.full(counts.size, bias), STYLES[1], points=False),
            Line(counts, of_mean, STYLES[0]),
        ),
        x_label="n",
    )

    def draw() -> Figure:
        figure, [row] = panels(1, 2, 2.8)
        for axes, panel in zip(row, (left, right), strict=True):
            draw_panel(axes, panel)
        row[1].set_xscale("log", base=2)
        row[1].set_yscale("log")
        row[1].set_xticks(counts, [f"{n:g}" for n in counts])
        row[1].minorticks_off()
        ticks = (0.02, 0.05, 0.1, 0.2)
        row[1].set_yticks(ticks, [f"{t:g}" for t in ticks])
        legend(figure, keys([left]))
        return figure

    crossing = next((int(n) for n, error in zip(counts, of_mean, strict=True) if error < bias), None)
    notes = (
        f"Left: {DRAWS} roundings of each number. Right: the root mean square error, relative to the root mean square "
        "of the numbers: normal numbers in blocks of 16 whose scales are powers of two. One stochastic rounding errs "
        f"{of_mean[0] / bias:.2f} times as much as rounding to nearest; the mean of {crossing} stochastic roundings "
        f"errs less. The slope is −{math.log2(of_mean[0] / of_mean[-1]) / math.log2(counts[-1]):.2f}; independent "
        "errors have a slope of −0.5.",
    )
    return FigureResult(draw, (), notes)


# -------------------------------------------------------------------------------- sums


@figure("primer", "Figure K", title="The error of a sum of K products, by accumulator")
def accumulators(results: Results) -> Picture:
    """Draw the errors of sums of K products against K on logarithmic axes, with a line for each accumulator.

    An error is the mean over the rows of a matrix product (`sums.errors`), drawn with the mean's 95 % interval.
    """
    looks = dict(zip(sums.SUMS, (BASELINE, *STYLES), strict=False))
    lengths = np.array(sums.LENGTHS, float)
    shown = []
    for distribution in ("uniform", "normal"):
        lines = []
        for name in sums.SUMS:
            found = np.array([sums.errors(name, distribution, k) for k in sums.LENGTHS])
            if (found[:, 0] > 0).all():  # a logarithmic axis cannot show an error of 0
                band = (np.maximum(found[:, 0] - found[:, 1], found[:, 0] / 10), found[:, 0] + found[:, 1])
                lines.append(Line(lengths, found[:, 0], looks[name], name, band))
        shown.append(Panel(f"{distribution.capitalize()} numbers", tuple(lines), x_label="products K"))

    def draw() -> Figure:
        figure, [row] = panels(1, 2, 3.1, sharey=True)
        for axes, panel in zip(row, shown, strict=True):
            draw_panel(axes, panel)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [f"{k:g}" for k in lengths])
        row[0].set_ylabel("relative error")
        legend(figure, keys(shown))
        return figure

    most = max(sums.errors("blackwell-fp8", d, k)[0] for d in ("uniform", "normal") for k in sums.LENGTHS)
    rows = ", ".join(f"{name} {_growth(name):.2f}" for name in ("fp16", "bf16", "hopper-fp8"))
    notes = (
        f"Bars are 95 % intervals over {sums.SIDE} rows. Errors of sums of uniform numbers grow with these powers of "
        f"K: {rows}. Adding the sum to an FP32 sum every 128 products (promotion) stops the growth. Blackwell's FP8 "
        f"sums err by at most {most:.0e} and are not drawn.",
    )
    return FigureResult(draw, (), notes)


def _growth(name: str) -> float:
    """Return p such that an accumulator's error for uniform numbers grows as K^p from the smallest K to the largest.

    name: the accumulator. The values of K, the number of summed products, are `sums.LENGTHS`.
    """
    first, last = (sums.errors(name, "uniform", k)[0] for k in (sums.LENGTHS[0], sums.LENGTHS[-1]))
    return math.log(last / first) / math.log(sums.LENGTHS[-1] / sums.LENGTHS[0])
