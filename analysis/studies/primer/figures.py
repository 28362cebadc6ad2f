"""Make the primer's tables, and a figure for each section but the eighth (figures.yaml); only Figure 9 reads trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import not_planned
from fewbits.analysis.figures.drawing import draw_flow
from fewbits.analysis.figures.panels import (
    Line,
    Panel,
    Rule,
    draw_panel,
    keys,
    legend,
    line_key,
    panels,
    rows_of_labels,
)
from fewbits.analysis.figures.theme import NOISE, QUIET, STYLES, Array, Style
from fewbits.analysis.report.items import FigureResult, Picture, Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import figure, table
from fewbits.analysis.studies.primer import samples
from fewbits.analysis.studies.primer.exact_training import SMALLEST, exponents
from fewbits.experiments.config import load_recipe
from fewbits.experiments.optimization.precision import LOWEST
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE

Draws = Mapping[str, Array]


def _panel(title: str, x: Array, ys: Draws, x_label: str, styles: Sequence[Style] = STYLES) -> Panel:
    """Return a panel with a line for each array of `ys`, whose keys are the labels in the legend."""
    lines = (Line(x, y, style, name) for (name, y), style in zip(ys.items(), styles, strict=False))
    return Panel(title, tuple(lines), x_label=x_label)


def _curves(shown: Sequence[Panel], log: Sequence[str], *notes: str, ids: Sequence[str] = ()) -> FigureResult:
    """Return a figure of panels beside each other. log: for each panel its logarithmic axes: "", "x", "y" or "xy"."""

    def draw() -> Figure:
        drawn, [row] = panels(1, len(shown), 2.9)
        for axes, panel, logs in zip(row, shown, log, strict=True):
            draw_panel(axes, panel)
            if "y" in logs:
                axes.set_yscale("log")
                low, high = axes.get_ylim()
                if high < 100 * low:
                    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
                    axes.yaxis.set_minor_formatter(NullFormatter())
            if "x" in logs:
                axes.set_xscale("log", base=2)
                axes.minorticks_off()
                if panel.lines[0].marked:
                    axes.set_xticks(panel.lines[0].x, [f"{tick:g}" for tick in panel.lines[0].x])
        legend(drawn, keys(shown))
        return drawn

    return FigureResult(draw, tuple(ids), notes)


@figure("primer", "Figure 1", title="The positive values of nine formats")
def values(results: Results) -> Picture:
    names = (*samples.FORMATS[:5], "int4", "int8", "fp16", "bf16")
    normal, subnormal = Style(0, marker=""), Style(1, marker="")

    def draw() -> Figure:
        drawn, [[axes]] = panels(1, 1, 3.5)
        for y, name in enumerate(names):
            x = samples.positive(name)
            inside, least = (abs(np.log2(x)) <= 18), TABLE[name].min_normal if name in TABLE else 0
            for part, style in ((x[inside & (x >= least)], normal), (x[inside & (x < least)], subnormal)):
                if y < 7:
                    axes.vlines(np.log2(part), y - 0.33, y + 0.33, color=style.shade, linewidth=0.7)
                elif part.size:  # too many values for strokes
                    axes.fill_between(np.log2(part[[0, -1]]), y - 0.33, y + 0.33, color=style.shade, linewidth=0)
        rows_of_labels(axes, [name.upper() for name in names])
        axes.set(xlim=(-18, 18), ylim=(len(names) - 0.4, -0.6), xlabel="magnitude")
        axes.set_xticks(range(-16, 17, 4), [f"$2^{{{tick}}}$" for tick in range(-16, 17, 4)])
        legend(drawn, [line_key("normal values", normal, 3), line_key("subnormal values", subnormal, 3)])
        return drawn

    return FigureResult(draw, (), ("Each stroke is a value; FP16 and BF16 are bands, and continue beyond the axis.",))


@figure("primer", "Figure 2", title="Rounding to E2M1, and the relative error of E4M3 by magnitude")
def rounding(results: Results) -> Picture:
    x, wide, grid = np.linspace(0, 8, 801), np.exp2(np.linspace(-12, 11, 1400)), samples.positive("e2m1")
    nearest, cast = (fake_quantize(torch.tensor(v), q).numpy() for v, q in ((x, "e2m1"), (wide, "e4m3")))
    down = np.array([0, *grid])[np.searchsorted(grid, x, side="right")]
    styles = [Style(colour, marker="") for colour in (0, 1, "quiet")]
    rounded = {"to nearest, ties to even": nearest, "down": down, "the number": x}
    shown = (
        _panel("Rounded to E2M1", x, rounded, "number", styles),
        _panel("Relative error of E4M3", wide, {"": np.abs(cast / wide - 1)}, "magnitude", styles),
    )
    note = "From the left of the second panel: underflow, subnormals, normal numbers (at most 2⁻⁴), saturation at 448."
    return _curves(shown, ("", "x"), note)


FACTORS = np.array([1, 4, 16, 64, 256, 1024], float)


@figure("primer", "Figure 3", title="One scale or a scale for each block, and outliers")
def scales(results: Results) -> Picture:
    casts = {
        f"{n}, {block}": f"{f}:{block}:amax"
        for n, f in (("INT8", "e1m6finite"), ("E4M3", "e4m3"))
        for block in ("tensor", "1x128")
    }
    tensors, ordinary = [samples.outliers(factor) for factor in FACTORS], samples.outliers(1) == samples.outliers(2)
    shown = []
    for title, part in (("all numbers", slice(None)), ("without outliers", ordinary)):
        errors = {
            n: np.array([samples.relative_mse(x[part], fake_quantize(x, q)[part]) for x in tensors])
            for n, q in casts.items()
        }
        shown.append(_panel(f"Squared error, {title}", FACTORS, errors, "factor of the outliers"))
    return _curves(shown, ("xy", "xy"), "Normal numbers, 0.1 % of which are multiplied by the factor.")


@figure("primer", "Figure 4", title="E2M1 with different scales, by the size of blocks")
def blocks(results: Results) -> Picture:
    sizes, shown = np.array([4, 8, 16, 32, 64, 128, 256], float), []
    rules = {"E4M3 scales (NVFP4)": "nvfp4", "E8M0, rounded down (MX)": "mx", "E8M0, rounded up": "e8m0"}
    for name in ("normal", "t(4)"):
        x = samples.tensors()[name]
        errors = {
            title: np.array([samples.error(x, f"e2m1:1x{n:g}:{rule}") for n in sizes]) for title, rule in rules.items()
        }
        shown.append(_panel(f"Squared error, {name}", sizes, errors, "elements of a block"))
    return _curves(shown, ("xy", "xy"), "A block of n elements has 4 + 8 / n bits an element.")


@figure("primer", "Figure 5", title="A random Hadamard transform of 16 values, and outliers")
def rotation(results: Results) -> Picture:
    bins, lines, looks = np.linspace(0, 16, 65), [], {"as they are": STYLES[1], "transformed": STYLES[0]}
    for name, x in (
        ("as they are", samples.outliers(16)),
        ("transformed", samples.rotated(samples.outliers(16))),
        ("normal numbers", samples.outliers(1)),
    ):
        share = np.histogram((x.abs() / x.abs().median()).clamp(max=16).flatten(), bins)[0] / x.numel()
        lines.append(Line(bins[1:][share > 0], share[share > 0], looks.get(name, NOISE), name, points=False))
    errors = []
    for quantizer, width in (("e2m1:tensor:amax", 2.4), ("e2m1:1x16:nvfp4", 1.2)):
        for style, change in ((STYLES[1], torch.clone), (STYLES[0], samples.rotated)):
            y = np.array([samples.error(change(samples.outliers(factor)), quantizer) for factor in FACTORS])
            errors.append(Line(FACTORS, y, style, width=width))
    shown = (
        Panel("Share, 0.1 % multiplied by 16", tuple(lines), x_label="magnitude, in medians"),
        Panel("Squared error of E2M1", tuple(errors), x_label="factor of the outliers"),
    )
    return _curves(shown, ("y", "xy"), "Thick lines: one scale for the tensor. Thin lines: NVFP4.")


@figure("primer", "Figure 6", title="Bias and variance of stochastic rounding")
def stochastic(results: Results) -> Picture:
    x, y, counts = torch.linspace(1, 2, 65), samples.tensors()["normal"][:64], np.exp2(np.arange(8))
    draws = fake_quantize(x.repeat(256, 1), "e2m1:stochastic", seed=1).numpy()
    mean, spread, at = draws.mean(0), draws.std(0), x.numpy()
    many = torch.stack([fake_quantize(y, "e2m1:1x16:e8m0:stochastic", seed=seed) for seed in range(128)]).double()
    of_mean = np.array([samples.relative_mse(y, many[: int(n)].mean(0)) ** 0.5 for n in counts])
    lines = (
        Line(at, fake_quantize(x, "e2m1").numpy(), STYLES[1], "nearest", points=False),
        Line(at, mean, STYLES[0], "stochastic, mean ± deviation", (mean - spread, mean + spread), points=False),
        Line(at, at, QUIET, "the number", points=False),
    )
    errors = {"stochastic": of_mean, "nearest": np.full(8, samples.error(y, "e2m1:1x16:e8m0") ** 0.5)}
    of_n = tuple(Line(counts, e, s) for e, s in zip(errors.values(), STYLES, strict=False))
    right = Panel("Relative error of the mean of n", of_n, x_label="n")
    note = f"One stochastic rounding errs {of_mean[0] / errors['nearest'][0]:.2f} times as much as rounding to nearest."
    return _curves((Panel("Rounded to E2M1", lines, x_label="number"), right), ("", "xy"), note)


@figure("primer", "Figure 7", title="The error of a sum of K products, by accumulator")
def accumulators(results: Results) -> Picture:
    shown, lengths = [], np.array(samples.LENGTHS, float)
    for kind in ("uniform", "normal"):
        sums = {name: [samples.mean_error(name, kind, k)[0] for k in samples.LENGTHS] for name in samples.SUMS[1:]}
        errors = {name: np.array(found) for name, found in sums.items()}
        shown.append(_panel(f"Relative error, {kind} numbers", lengths, errors, "products K"))
    note = "`promoted`: Hopper's sum is added to an FP32 sum every 128 products. FP32 errs less than 1e-6."
    return _curves(shown, ("xy", "xy"), note)


@figure("primer", "Figure 9", title="Exponents of gradients, and the range of FP16")
def gradient_exponents(results: Results) -> Picture:
    arms = {"bf16": "BF16", "fp16-unscaled": "FP16, unscaled", "fp16-static": "FP16, 2^6", "fp16": "FP16, dynamic"}
    if not any(map(results.has, arms)):
        return not_planned(results)
    trials, x, ids = exponents(results), np.arange(-36.0, 1), []
    shares, zeros = {}, []
    for arm, name in arms.items():
        if members := [m.id for m in results.members if m.cell.arm == arm and m.id in trials]:
            shares[name] = 100 * np.mean([trials[m][0][-36 - LOWEST : 1 - LOWEST] for m in members], axis=0)
            zeros.append(f"{name} {np.mean([trials[m][1] for m in members]):.2%}")
            ids += members
    if not shares:
        return NoData("no trial has measured gradients yet")
    rules = (
        Rule(SMALLEST, label="FP16's smallest number", upright=True, dashes=(4, 2)),
        Rule(TABLE["fp16"].emin, label="its smallest normal number", upright=True),
    )
    lines = _panel("", x, shares, "").lines
    panel = Panel("Share of the gradients, %", lines, rules, x_label="exponent, without the loss scale")
    return _curves((panel,), ("",), f"Gradients that are 0: {', '.join(zeros)}.", ids=ids)


@figure("primer", "Figure 10", title="The casts of a linear layer in DeepSeek-V3's recipe")
def flow(results: Results) -> Picture:
    notes = ("Drawn from the recipe `fp8`. Master weights are FP32; sums move to FP32 every 128 elements.",)
    return FigureResult(lambda: draw_flow(load_recipe("fp8"), "bf16"), (), notes)


# -------------------------------------------------------------------------------- tables


def _printed(results: Results, name: str) -> TableResult:
    """Return our casts beside those that the table with this id prints; numbers beyond the range become NaN."""
    rows = [
        TableRow(title, tuple(TableCell(Setting(a), b, "printed") for a, b in zip(ours, printed, strict=True)))
        for title, ours, printed in samples.casts(name)
    ]
    return TableResult(("x1", "x2", "x3", "x4"), tuple(rows))


for _name in ("Table 1", "Table 2", "Table 3"):
    table("primer", _name)(partial(_printed, name=_name))


@table("primer", "Formats", title="Formats: largest, smallest normal and smallest subnormal number, and step")
def formats(results: Results) -> TableResult:
    rows = []
    for f in (TABLE[name] for name in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "e8m0", "fp16", "bf16")):
        least = f"{f.min_subnormal:.3g}" if f.has_zero else "none"
        cells = f.bits, f"{f.max:.5g}", f"{f.min_normal:.3g}", least, f"{2.0**-f.mantissa_bits:.3g}"
        rows.append(TableRow(f.name.upper(), tuple(TableCell(Setting(str(cell))) for cell in cells)))
    columns = ("bits", "largest", "normal", "subnormal", "step at 1")
    notes = ("INT8 and INT4 have codes from −128 to 127 and from −8 to 7, and one step everywhere.",)
    return TableResult(columns, tuple(rows), (*notes, "`fewbits number 0.3` rounds a number to every format."))
