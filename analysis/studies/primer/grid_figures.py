"""Draw the values of number formats, the steps between them, and casts without scales.

The casts are of the numbers that the second text prints (002 in analysis/studies/primer/paper.yaml).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.panels import legend, line_key, panels, rows_of_labels
from fewbits.analysis.figures.theme import SMALL, STYLES, Array, Style, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.primer import grids

NORMAL, SUBNORMAL = Style(0, marker=""), Style(1, marker="")
SHOWN = (-18, 18)  # the range of the axis of the figure of values, as exponents of two
DENSE = 64  # a format with more values than this in a binade is drawn as a band
STEPS = (  # the title of a panel, its formats, and the ranges of its x and y axes, as exponents of two
    ("8 bits", ("e4m3", "e5m2", "int8"), (-18, 18), (-18, 18)),
    ("4 and 6 bits", ("e2m1", "e2m3", "e3m2", "int4"), (-5, 6), (-5, 6)),
    ("16 bits, and scales", ("bf16", "fp16", "e8m0"), (-18, 18), (-26, 20)),
)


@figure("primer", "Figure G", title="The values of ten formats on a logarithmic axis")
def values(results: Results) -> Picture:
    """Draw each positive value of a format as a stroke in the format's row; subnormals have another colour."""

    def draw() -> Figure:
        figure, [[axes]] = panels(1, 1, 3.7)
        for y, name in enumerate(grids.DRAWN):
            grid = grids.grid(name)
            _strokes(axes, y, grid.subnormal, SUBNORMAL, grid.per_binade)
            _strokes(axes, y, grid.normal, NORMAL, grid.per_binade)
            _ends(axes, y, grid)
        rows_of_labels(axes, [name.upper() for name in grids.DRAWN])
        axes.set(xlim=SHOWN, ylim=(len(grids.DRAWN) - 0.4, -0.6), xlabel="magnitude")
        ticks = range(-16, 17, 4)
        axes.set_xticks(ticks, [_power(tick) for tick in ticks])
        axes.grid(visible=True, axis="x")
        axes.tick_params(axis="y", pad=9)  # room for the arrows
        legend(figure, [line_key("normal values", NORMAL, 3), line_key("subnormal values", SUBNORMAL, 3)])
        return figure

    dense = [name.upper() for name in grids.DRAWN if grids.grid(name).per_binade > DENSE]
    notes = (
        f"Each stroke is a positive value; a logarithmic axis has no zero. {' and '.join(dense)} have too many values "
        "for strokes and are bands. E8M0 has no zero and no sign; INT8 and INT4 have a scale of 1.",
        "Arrows: the format has values beyond the axis. Smallest and largest values: "
        + "; ".join(f"{name.upper()}: {_ends_text(grids.grid(name))}" for name in ("bf16", "e8m0", "fp16")),
    )
    return FigureResult(draw, (), notes)


def _strokes(axes: Axes, y: int, magnitudes: Array, style: Style, per_binade: int) -> None:
    inside = np.log2(magnitudes)
    inside = inside[(inside >= SHOWN[0]) & (inside <= SHOWN[1])]
    if not inside.size:
        return
    if per_binade > DENSE:
        axes.fill_between([inside[0], inside[-1]], y - 0.33, y + 0.33, color=style.shade, linewidth=0)
    else:
        axes.vlines(inside, y - 0.33, y + 0.33, color=style.shade, linewidth=0.7)


def _ends(axes: Axes, y: int, grid: grids.Grid) -> None:
    """Draw an arrow at each edge of the x axis beyond which a format has values. y: the row of the format."""
    everything = np.log2(np.concatenate([grid.subnormal, grid.normal]))
    arrow = {"arrowstyle": "-|>", "color": theme().quiet, "linewidth": 0.9}
    for edge, beyond, inward in (
        (SHOWN[0], everything.min() < SHOWN[0], 1),
        (SHOWN[1], everything.max() > SHOWN[1], -1),
    ):
        if beyond:
            axes.annotate(
                "", (edge - 0.7 * inward, y), (edge + 0.1 * inward, y), arrowprops=arrow, annotation_clip=False
            )


def _ends_text(grid: grids.Grid) -> str:
    """Return the smallest and the largest positive value of a format as the text `SMALLEST to LARGEST`."""
    least = float(min([*grid.subnormal, *grid.normal]))
    return f"{least:.3g} to {float(grid.normal.max()):.4g}"


def _power(exponent: int) -> str:
    return f"2{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


@figure("primer", "Figure H", title="The step between neighbouring values against the magnitude")
def steps(results: Results) -> Picture:
    """Draw the step between neighbouring values over their magnitude, both on logarithmic axes.

    The step is constant for integers and subnormals; for normal numbers, it doubles from each binade to the next.
    """

    def draw() -> Figure:
        figure, [row] = panels(1, 3, 2.9)
        for axes, (title, names, across, up) in zip(row, STEPS, strict=True):
            axes.set_title(title)
            axes.set(xlim=across, ylim=up, xlabel="magnitude")
            for name, style in zip(names, STYLES, strict=False):
                _draw_steps(axes, grids.grid(name), style)
            keys = [line_key(name.upper(), style, 1.3) for name, style in zip(names, STYLES, strict=False)]
            axes.legend(handles=keys, loc="upper left", fontsize=SMALL - 1)
            for axis, (low, high) in ((axes.xaxis, across), (axes.yaxis, up)):
                ticks = range(-24, high, 8) if high - low > 20 else range(-4, high, 2)
                axis.set_ticks([tick for tick in ticks if tick >= low], [_power(t) for t in ticks if t >= low])
        row[0].set_ylabel("step")
        return figure

    notes = (
        "A mark is the smallest normal value: to its left the subnormals continue with the same step.",
        "Steps relative to the value: at most "
        + ", ".join(f"{name.upper()} {_relative(name):.3g}" for name in ("e4m3", "e5m2", "e2m1", "bf16", "fp16"))
        + " for normal values.",
    )
    return FigureResult(draw, (), notes)


def _draw_steps(axes: Axes, grid: grids.Grid, style: Style) -> None:
    starts, gaps = (np.log2(part) for part in _staircase(np.concatenate([grid.subnormal, grid.normal])))
    axes.step(starts, gaps, where="post", color=style.shade, dashes=style.dashes or (None, None))
    if grid.subnormal.size:
        place = float(np.log2(grid.normal.min()))
        height = gaps[np.searchsorted(starts, place, side="right") - 1]
        if axes.get_xlim()[0] <= place:
            axes.plot([place], [height], style.marker, color=style.shade, ms=5)


def _staircase(magnitudes: Array) -> tuple[Array, Array]:
    """Return two arrays: the magnitudes at which the step changes, and the step from each of these magnitudes on.

    magnitudes: all positive values of a format, in ascending order. A step is the distance between two neighbouring
    values. The last returned magnitude is the format's largest value; its step repeats the step before it.
    """
    gaps = np.diff(magnitudes)
    changes = np.concatenate([[True], gaps[1:] != gaps[:-1]])
    return np.append(magnitudes[:-1][changes], magnitudes[-1]), np.append(gaps[changes], gaps[-1])


def _relative(name: str) -> float:
    """Return the maximum of (step to the next value) / value over a format's normal values."""
    normal = grids.grid(name).normal
    return float((np.diff(normal) / normal[:-1]).max())


# -------------------------------------------------------------------------------- the printed casts

SPANS = {"loss of precision": (0.3, 1.7), "overflow": (100.0, 4000.0), "underflow": (7e-5, 4e-3)}
RESULT = Style(1, marker="o")


@figure("primer", "Figure C", title="The three printed casts to E4M3: precision loss, overflow and underflow")
def casts(results: Results) -> Picture:
    """Draw our casts to E4M3, with a panel for each of the three tables of casts in the primer's text 002.

    A panel shows the inputs that the text prints, the values of E4M3, and the results of the casts.
    """

    def draw() -> Figure:
        figure, grid = panels(3, 1, 5.0)
        for [axes], (title, lines) in zip(grid, grids.TABLES.items(), strict=True):
            _cast_panel(axes, title, lines["fp32"])
        grid[-1][0].set_xlabel("magnitude; the grey lines are the values of E4M3")
        marks = [
            Line2D([], [], linestyle="", marker="o", mfc="none", mec=theme().text, label="printed FP32 input"),
            Line2D([], [], linestyle="", marker="o", color=RESULT.shade, label="after the cast"),
        ]
        legend(figure, marks)
        return figure

    notes = (
        "Overflow by the text's rule (NaN beyond 464); saturation gives 448. All 20 printed casts are compared in "
        "Tables 1 to 3.",
    )
    return FigureResult(draw, (), notes)


def _cast_panel(axes: Axes, title: str, inputs: Sequence[float]) -> None:
    low, high = SPANS[title]
    axes.set_title(title.capitalize())
    axes.set_xscale("log")
    lines = [v for v in np.concatenate([grids.grid("e4m3").subnormal, grids.grid("e4m3").normal]) if low < v < high]
    axes.vlines(lines, -0.6, len(inputs) - 0.4, color=theme().grid, linewidth=1)
    outputs = grids.cast(tuple(inputs), "e4m3", "nan" if title == "overflow" else "saturate")
    for y, (before, after) in enumerate(zip(inputs, outputs, strict=True)):
        start, end = abs(before), abs(after)
        special = "NaN" if math.isnan(end) else "0" if end == 0 else ""
        place = (high * 0.93 if special == "NaN" else low * 1.08) if special else end
        if abs(math.log(place / start)) > 0.02 * math.log(high / low):
            arrow = {
                "arrowstyle": "-|>",
                "color": theme().quiet,
                "linewidth": 0.9,
                "shrinkA": 3,
                "shrinkB": 13 if special == "NaN" else 5,
            }
            axes.annotate("", (place, y), (start, y), arrowprops=arrow)
        if special:
            axes.text(place, y, special, color=RESULT.shade, ha="center", va="center", fontsize=SMALL, weight="bold")
        else:
            axes.plot([place], [y], "o", color=RESULT.shade, ms=4.5)
        axes.plot([start], [y], "o", mfc="none", mec=theme().text, ms=6)
    rows_of_labels(axes, [f"{value:g}".replace("-", "−") for value in inputs])
    axes.set(xlim=(low, high), ylim=(len(inputs) - 0.4, -0.6))
    axes.minorticks_off()
    ticks = [t for t in (1e-4, 3e-4, 1e-3, 3e-3, 0.3, 0.5, 1.0, 1.5, 100, 300, 1000, 3000) if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
