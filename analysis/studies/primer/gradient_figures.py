"""Draw a histogram of the gradients' exponents with the range of FP16, as in the paper that introduced loss scaling.

The primer's second text (002) cites this paper, "Mixed Precision Training".
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import not_planned
from fewbits.analysis.figures.curves import Line, Panel, Rule, draw_panel, keys
from fewbits.analysis.figures.panels import legend, panels
from fewbits.analysis.figures.theme import STYLES
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.primer.metrics import SMALLEST, exponents
from fewbits.experiments.optimization.update_records import LOWEST
from fewbits.kernels.formats import TABLE

ARMS = {"bf16": "BF16", "fp16-unscaled": "FP16, no loss scaling", "fp16": "FP16, loss scaling"}
SHOWN = (-44, 2)  # the range of exponents in the figure


@figure("primer", "Figure E", title="Exponents of gradients, and the range of FP16")
def gradient_exponents(results: Results) -> Picture:
    """Draw for each arm a histogram of the exponents of the gradients of linear layers' results.

    The figure's notes give the share of gradients that are 0.
    """
    found = exponents(results)
    by_arm = {
        arm: [found[m.id] for m in results.members if m.cell.arm == arm and m.id in found]
        for arm in ARMS
        if results.has(arm)
    }
    if not by_arm:
        return not_planned(results)
    if not any(by_arm.values()):
        return NoData("no trial has measured gradients yet")
    lines, zeros = [], []
    x = np.arange(SHOWN[0], SHOWN[1] + 1, dtype=float)
    for (arm, trials), style in zip(by_arm.items(), STYLES, strict=False):
        if not trials:
            continue
        shares = np.mean([shares for shares, _ in trials], axis=0)
        shown = 100 * shares[SHOWN[0] - LOWEST : SHOWN[1] - LOWEST + 1]
        lines.append(Line(x, shown, style, ARMS[arm], points=False))
        zeros.append(f"{ARMS[arm]}: {np.mean([zero for _, zero in trials]):.2%}")
    normal = TABLE["fp16"].emin
    panel = Panel(
        "Share of the gradients, %",
        tuple(lines),
        (Rule(SMALLEST, label="FP16's smallest number, 2^−24", upright=True, dashes=(4, 2)),
         Rule(normal, label=f"its smallest normal number, 2^−{-normal}", upright=True)),
        x_label="exponent of the gradient, without the loss scale",
    )  # fmt: skip

    def draw() -> Figure:
        figure, [[axes]] = panels(1, 1, 2.8)
        draw_panel(axes, panel)
        axes.set_ylim(bottom=0)
        legend(figure, keys([panel]), 2)
        return figure

    notes = (
        f"Gradients that are 0: {'; '.join(zeros)}. A loss scale of 2^k moves FP16's range down by k: its smallest "
        f"number is 2^({SMALLEST} − k) then.",
        "Gradients of the results of all linear layers, at measured updates; gradients below FP16's normal numbers "
        "keep fewer bits, and gradients of at most half of FP16's smallest number become 0.",
    )
    ids = tuple(m.id for m in results.members if m.cell.arm in ARMS and m.id in found)
    return FigureResult(draw, tuple(dict.fromkeys(ids)), notes)
