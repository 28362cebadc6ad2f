"""Figure C: which tensors fall back, and in which layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fewbits.analysis import heat, plots
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.mor.decisions import decisions
from fewbits.analysis.mor.heat_maps import PARTS
from fewbits.analysis.mor.looks import (
    ABLATIONS,
    PARTITIONS,
    SUB_TENSOR,
    chosen,
)
from fewbits.analysis.plots import SMALL
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, Picture

KINDS = {"x": "input", "w": "weight", "dy": "grad"}
COLUMNS = {
    "tensor": "Tensor",
    "block": "Block",
    "block-64": "64×64",
    "channel": "Channel",
    "threshold-5": "Th. 5 %",
    "amax": "amax",
    "e8m0": "E8M0",
    "two-way": "2-way",
    "three-way": "3-way",
}


@figure("mor", "Figure C", "Where tensors fall back")
def where(results: Results) -> Picture:
    """The share of decisions for BF16 of every arm, by linear layer and tensor, and by layer."""
    found = {}
    for of in (PARTITIONS, ABLATIONS, SUB_TENSOR):
        part = chosen(results, of.sweep, "1")
        if isinstance(part, Results):
            frame = decisions(part)
            for arm in COLUMNS:
                if arm not in found and len(rows := frame[frame["arm"] == arm]):
                    found[arm] = rows.assign(kind=rows["slot"].str.split(".").str[1].map(KINDS))
    if not found:
        return NoData("no decision was recorded")
    arms = [arm for arm in COLUMNS if arm in found]
    tensors = [(f"{PARTS[part]} {kind}", part, kind) for part in list(PARTS)[:4] for kind in KINDS.values()]
    layers = sorted({int(layer) for rows in found.values() for layer in rows["block"].unique()})
    of_tensor = {arm: rows.groupby(["part", "kind"])["fallback"].mean().to_dict() for arm, rows in found.items()}
    of_layer = {arm: rows.groupby("block")["fallback"].mean().to_dict() for arm, rows in found.items()}
    by_tensor = [[of_tensor[arm].get((part, kind), math.nan) for arm in arms] for _, part, kind in tensors]
    by_layer = [[of_layer[arm].get(layer, math.nan) for arm in arms] for layer in layers]

    def draw() -> Figure:
        sizes = (len(tensors), len(layers))
        picture, ((above,), (below,)) = plots.panels(2, 1, 1.0 + 0.2 * sum(sizes), height_ratios=sizes)
        _shares(above, by_tensor, [label for label, _, _ in tensors], [COLUMNS[arm] for arm in arms])
        above.set_title("Decisions for BF16, %")
        _shares(below, by_layer, [f"layer {layer + 1}" for layer in layers], None)
        return picture

    notes = (
        "Share of decisions for BF16, in percent, mean over the branch and seeds; configuration 1. Empty: none. "
        "Two- and three-way decide block by block, the others tensor by tensor.",
    )
    return FigureResult(draw, tuple(dict.fromkeys(i for rows in found.values() for i in rows["id"])), notes)


def _shares(axes: Axes, table: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str] | None) -> None:
    """Cells shaded by their number, which stands in them."""
    shade, theme = heat.shades(), plots.theme()
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            if np.isnan(value) or value == 0:
                continue
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=shade(value), linewidth=0))
            words = f"{100 * value:.0f}" if value >= 0.0995 else f"{100 * value:.1f}" if value >= 0.0005 else "<0.1"
            ink = heat.ink(shade(value))
            axes.text(x, y, words, ha="center", va="center_baseline", fontsize=SMALL, color=ink)
    axes.set(xlim=(-0.5, len(table[0]) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(table[0])), columns or [""] * len(table[0]))
    axes.tick_params(length=0, labelbottom=False, labeltop=columns is not None)
    axes.grid(False)
    for y in range(len(rows) + 1):
        axes.axhline(y - 0.5, color=theme.grid, linewidth=0.6, zorder=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
