"""Draw errors and stored bits of blocks that share a scale: rules for the scale, outliers, sizes, orientation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.curves import Line, Panel, draw_panel, keys
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure
from fewbits.analysis.figures.panels import legend, line_key, panels, percent, rows_of_labels
from fewbits.analysis.figures.theme import STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.primer import blocks

RULES = {"floor": "floor (OCP)", "nearest": "nearest power", "up": "up, nothing saturates"}
MARKS = tuple(Style(style.colour, (), style.marker) for style in STYLES)


def _dots(axes: Axes, title: str, rows: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a panel with labelled rows and a mark for each series in each row.

    rows: labels, from the top. series: by name, a number for each row.
    """
    axes.set_title(title)
    for i, values in enumerate(series.values()):
        ys = np.arange(len(rows)) + 0.16 * (i - (len(series) - 1) / 2)
        axes.plot(values, ys, linestyle="", marker=MARKS[i].marker, color=MARKS[i].shade, ms=5)
    rows_of_labels(axes, rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=True, axis="x")
    for y in range(1, len(rows)):
        axes.axhline(y - 0.5, color=axes.spines["left"].get_edgecolor(), linewidth=0.2)


def _log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


@figure("primer", "Figure S", title="Rules for the scale of a block, over distributions")
def scale_rules(results: Results) -> Picture:
    """Draw E2M1's squared errors, and shares of saturated values, for several rules that choose a block's scale.

    Three rules choose powers of two as scales of blocks of 32. For comparison, the errors are also drawn for blocks of
    16 with E4M3 scales (NVFP4) and with powers of two.
    """
    found = {name: blocks.mx_rules(name) for name in blocks.samples()}
    rules = {title: [found[name][rule][0] for name in found] for rule, title in RULES.items()}
    saturating = {title: [found[name][rule][1] for name in found] for rule, title in RULES.items()}
    small = {
        "E4M3 scale, 1x16": [blocks.error_of(name, "e2m1:1x16:nvfp4") for name in found],
        "E8M0 scale, 1x16": [blocks.error_of(name, "e2m1:1x16:e8m0") for name in found],
    }

    def draw() -> Figure:
        figure, [[left, right]] = panels(1, 2, 3.0, sharey=True, width_ratios=[3, 2])
        _dots(left, "Relative squared error", list(found), {**rules, **small})
        _dots(right, "Share that saturates, %", list(found), saturating)
        _log_ticks(left, (0.001, 0.003, 0.01, 0.03))
        right.xaxis.set_major_formatter(percent())
        legend(figure, [_key(name, i) for i, name in enumerate({**rules, **small})])
        return figure

    best = {name: min(rules, key=lambda title: rules[title][i]) for i, name in enumerate(found)}
    notes = (
        "E2M1 in blocks of 32 with powers of two as scales, and in blocks of 16 with NVFP4's scales and with powers of "
        "two. The rule with the smallest error: " + "; ".join(f"{name}: {title}" for name, title in best.items()),
    )
    return FigureResult(draw, (), notes)


def _key(label: str, place: int) -> Line2D:
    key = line_key(label, MARKS[place])
    key.set_linestyle("")
    return key


CASTS = {
    "naive": "",
    "tensor": ":tensor:amax",
    "128x128": ":128x128:amax",
    "1x128": ":1x128:amax",
    "1x32, MX": ":1x32:mx",
}


@figure("primer", "Figure O", title="Naive, scaled and per-block casts of numbers with outliers")
def outliers(results: Results) -> Picture:
    """Draw the errors of several casts of numbers with outliers: of all numbers, and of those below 10 in magnitude."""
    formats = {"E4M3": "e4m3", "INT8": "e1m6finite"}
    everything = {
        title: [_unless_naive(name, cast, blocks.error_of) for cast in CASTS.values()]
        for title, name in formats.items()
    }
    ordinary = {
        title: [_unless_naive(name, cast, blocks.error_of_small) for cast in CASTS.values()]
        for title, name in formats.items()
    }

    def draw() -> Figure:
        figure, [[left, right]] = panels(1, 2, 2.7, sharey=True)
        _dots(left, "All numbers", list(CASTS), everything)
        _dots(right, "Numbers below 10", list(CASTS), ordinary)
        for axes in (left, right):
            _log_ticks(axes, (1e-5, 1e-3, 1e-1, 10))
            axes.set_xlabel("relative squared error")
        legend(figure, [_key(name, i) for i, name in enumerate(formats)])
        return figure

    count = int((blocks.samples()["outliers"].abs() > 10).sum())
    notes = (
        f"Normal numbers of which {count} of {blocks.samples()['outliers'].numel():,} are multiplied by 1000. A naive "
        "cast has no scale and saturates at 448; INT8 always has a scale.",
        "E4M3 has the same relative precision at any scale, so with one scale for the tensor only small numbers "
        "become 0; INT8 has one step for all numbers, and the outliers determine it.",
    )
    return FigureResult(draw, (), notes)


def _unless_naive(name: str, cast: str, error: Callable[[str, str], float]) -> float:
    """Return the error of a cast of the distribution `outliers`; NaN for INT8 without a scale, which makes no sense.

    name: the format. cast: the block and scaling that are appended to `name` to spell a quantizer; empty: no scale.
    error: returns the error, given the name of the distribution (see `blocks.samples`) and the quantizer.
    """
    return float("nan") if name != "e4m3" and not cast else error("outliers", f"{name}{cast}")


SIZES = (4, 8, 16, 32, 64, 128, 256)
STORED = {
    "E2M1, E4M3 scale": "e2m1:1x{}:nvfp4",
    "E2M1, E8M0 scale": "e2m1:1x{}:mx",
    "E2M3, E8M0 scale": "e2m3:1x{}:mx",
    "E4M3, E8M0 scale": "e4m3:1x{}:mx",
}


@figure("primer", "Figure B", title="Stored bits of an element and its error, by the size of blocks")
def block_sizes(results: Results) -> Picture:
    """Draw the stored bits per element, and the error on normally distributed values, over the size of blocks."""
    sizes = np.array(SIZES, float)
    bits = {
        name: np.array([blocks.bits_per_element(spec.format(n), 1024) for n in SIZES]) for name, spec in STORED.items()
    }
    errors = {
        name: np.array([blocks.error_of("normal", spec.format(n)) for n in SIZES]) for name, spec in STORED.items()
    }
    marks = dict(zip(STORED, STYLES, strict=False))
    shown = [
        Panel(
            "Bits of an element",
            tuple(Line(sizes, bits[n], marks[n], n) for n in STORED),
            x_label="elements of a block",
        ),
        Panel(
            "Relative squared error",
            tuple(Line(sizes, errors[n], marks[n], n) for n in STORED),
            x_label="elements of a block",
        ),
    ]

    def draw() -> Figure:
        figure, [row] = panels(1, 2, 2.7)
        for axes, panel in zip(row, shown, strict=True):
            draw_panel(axes, panel)
            _log_ticks(axes, SIZES)
        row[1].set_yscale("log")
        legend(figure, keys(shown), 2)
        return figure

    notes = (
        "Bits are counted in packed tensors of 16,384 elements, with all scales. Errors are of normal numbers: NVFP4 "
        f"has {bits['E2M1, E4M3 scale'][2]:.4g} bits and an error of {errors['E2M1, E4M3 scale'][2]:.2g}, MXFP4 "
        f"{bits['E2M1, E8M0 scale'][3]:.4g} bits and an error of {errors['E2M1, E8M0 scale'][3]:.2g}.",
    )
    return FigureResult(draw, (), notes)


@figure("primer", "Figure T", title="Where a quantized matrix differs from its quantized transpose")
def transposes(results: Results) -> Picture:
    """Draw |Q(w) − Q(wᵀ)ᵀ| of one matrix w for two quantizers Q: with blocks of one row, and with square blocks."""
    specs = {"1x16 blocks": "e2m1:1x16:nvfp4", "16x16 blocks": "e2m1:16x16:nvfp4"}
    found = {title: blocks.transpose_gap(spec, 32) for title, spec in specs.items()}
    most = float(max(gap.max() for gap in found.values()))
    maps = [
        HeatMap(
            tuple(HeatRow(f"{i}" if i % 16 == 0 else "", row) for i, row in enumerate(gap.numpy()[:16])),
            tuple(f"{j}" if j % 16 == 0 else "" for j in range(32)),
            title,
            most=most,
        )
        for title, gap in found.items()
    ]
    shares = ", ".join(f"{float((gap > 0).float().mean()):.0%} with {title}" for title, gap in found.items())
    norms = ", ".join(f"{blocks.transpose_difference(spec):.3f} ({title})" for title, spec in specs.items())
    notes = (
        f"The first 16 rows of a 32×32 normal matrix; empty cells have no difference. Cells that differ: {shares}. "
        f"‖Q(w) − Q(wᵀ)ᵀ‖ / ‖w‖ of a large matrix: {norms}.",
    )
    return FigureResult(lambda: heat_map_figure(maps, key=f"difference, of {most:.2g}", beside=True), (), notes)
