"""Draw what rotation does to outliers, stochastic rounding to bias and variance, and accumulators to long sums."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.curves import Line, Panel, draw_panel, keys
from fewbits.analysis.figures.panels import legend, panels
from fewbits.analysis.figures.theme import BASELINE, NOISE, QUIET, STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.primer import blocks, sums
from fewbits.kernels.api import fake_quantize

# -------------------------------------------------------------------------------- rotation

BINS = np.linspace(0, 12, 49)


@figure("primer", "Figure R", title="A Hadamard transform of 16 values, and outliers")
def rotation(results: Results) -> Picture:
    """Show the distribution of magnitudes before and after the transform, and the errors of casts of both."""
    x = blocks.samples()["outliers"]
    parts = {"before": x.double(), "rotated": blocks.rotated(x)}
    normal = blocks.samples()["normal"].double()
    centres = (BINS[1:] + BINS[:-1]) / 2
    shares = {name: _shares(part) for name, part in {**parts, "normal numbers": normal}.items()}
    looks = {"before": STYLES[1], "rotated": STYLES[0], "normal numbers": NOISE}
    histogram = Panel(
        "Share of the elements",
        tuple(
            Line(centres[share > 0], share[share > 0], looks[name], name, points=False)
            for name, share in shares.items()
        ),
        x_label="magnitude, in medians",
    )
    errors = {
        name: [blocks.error(part.float(), spec) for spec in ROTATED_CASTS.values()] for name, part in parts.items()
    }
    places = np.arange(len(ROTATED_CASTS), dtype=float)
    cast = Panel(
        "Relative squared error",
        tuple(Line(places, np.array(errors[name]), Style(looks[name].colour, (0, 1), looks[name].marker)) for name in errors),
    )

    def draw() -> Figure:
        figure, [row] = panels(1, 2, 2.7)
        for axes, panel in zip(row, (histogram, cast), strict=True):
            draw_panel(axes, panel)
            axes.set_yscale("log")
        row[1].set_xticks(places, list(ROTATED_CASTS))
        row[1].margins(x=0.15)
        legend(figure, keys([histogram]))
        return figure

    worse = [name for i, name in enumerate(ROTATED_CASTS) if errors["rotated"][i] > errors["before"][i]]
    ordinary = parts["before"].abs() < 10
    spread = {
        name: float(part.abs().median()) for name, part in parts.items()
    }
    notes = (
        f"Normal numbers with 0.1 % outliers: kurtosis {blocks.kurtosis(False):.0f} before and "
        f"{blocks.kurtosis(True):.0f} after (3 for normal numbers). {float((~ordinary).double().mean()):.1%} of the "
        f"numbers are large before; the transform spreads each over 16 (median magnitude {spread['before']:.2g} "
        f"and {spread['rotated']:.2g}).",
        "Errors relative to all numbers, outliers included. "
        + (
            f"The transform makes it larger for {' and '.join(worse)}: an outlier alone is the block's largest value "
            "and is stored well"
            if worse
            else "The transform makes it smaller in all of these casts"
        ),
    )
    return FigureResult(draw, (), notes)


ROTATED_CASTS = {"tensor": "e2m1:tensor:amax", "1x32 MX": "e2m1:1x32:mx", "1x16 NVFP4": "e2m1:1x16:nvfp4"}


def _shares(x: torch.Tensor) -> np.ndarray:
    """Return the share of elements in each bin of magnitudes in medians; the last bin is open."""
    scaled = (x.abs() / x.abs().median()).clamp(max=float(BINS[-1])).flatten().numpy()
    return np.histogram(scaled, BINS)[0] / scaled.size


# -------------------------------------------------------------------------------- stochastic rounding

DRAWS = 256
POINT = (1.0, 2.0)  # the interval of the left panel: one step and a half of E2M1 around 1.5


@figure("primer", "Figure N", title="Bias and variance of stochastic rounding")
def stochastic(results: Results) -> Picture:
    """Show the mean of rounded numbers, and the error of the mean of n roundings."""
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
        f"Left: {DRAWS} roundings of each number. Right: root mean square errors relative to that of the numbers, "
        "normal numbers in blocks of 16 with powers of two. One stochastic rounding errs "
        f"{of_mean[0] / bias:.2f} times as much as rounding to nearest; the mean of {crossing} errs less. The slope is "
        f"−{math.log2(of_mean[0] / of_mean[-1]) / math.log2(counts[-1]):.2f}, and that of independent errors −0.5.",
    )
    return FigureResult(draw, (), notes)


# -------------------------------------------------------------------------------- sums


@figure("primer", "Figure K", title="The error of a sum of K products, by accumulator")
def accumulators(results: Results) -> Picture:
    """Show the errors of Table K on logarithmic axes, with 95 % intervals over rows."""
    looks = dict(zip(sums.SUMS, (BASELINE, *STYLES), strict=False))
    lengths = np.array(sums.LENGTHS, float)
    shown = []
    for distribution in ("uniform", "normal"):
        lines = []
        for name in sums.SUMS:
            found = np.array([sums.errors(name, distribution, k) for k in sums.LENGTHS])
            if (found[:, 0] > 0).all():
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

    rows = ", ".join(f"{name} {_growth(name):.2f}" for name in ("fp16", "bf16", "hopper-fp8"))
    notes = (
        f"Bars are 95 % intervals over {sums.SIDE} rows. Slopes of uniform numbers, in powers of K: {rows}. Promotion "
        "every 128 products stops the growth.",
    )
    return FigureResult(draw, (), notes)


def _growth(name: str) -> float:
    """Return the power of K with which the error of sums of uniform numbers grows, from the shortest to the longest."""
    first, last = (sums.errors(name, "uniform", k)[0] for k in (sums.LENGTHS[0], sums.LENGTHS[-1]))
    return math.log(last / first) / math.log(sums.LENGTHS[-1] / sums.LENGTHS[0])
