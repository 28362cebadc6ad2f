"""Figure B: how far weight gradients are from what they would be unquantized, by linear layer and part (N7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fewbits.analysis import heat, plots
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.nvfp4.arms import part
from fewbits.analysis.nvfp4.gradient_errors import ERROR, measured
from fewbits.analysis.plots import SMALL
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.sweeps.running.store import State

PARTS = {"in": "in", "qkv": "QKV", "out": "out", "up": "up", "down": "down"}  # from a block's input to its output


@dataclass(frozen=True)
class Shown:
    """An arm of a sweep, in a panel of its own."""

    sweep: str
    arm: str
    title: str


PANELS = (
    Shown("layers", "nvfp4-base", "20 blocks, nothing added"),
    Shown("recipe", "nvfp4-base", "6 blocks, nothing added"),
    Shown("recipe", "nvfp4", "6 blocks, the whole recipe"),
    Shown("hybrid", "nvfp4", "hybrid, the whole recipe"),
)


@dataclass(frozen=True)
class Errors:
    """Relative errors, means over seeds at the end of training."""

    of: Mapping[tuple[str, int], float]  # part and block, from 1
    trials: tuple[str, ...]
    seeds: int

    @property
    def parts(self) -> list[str]:
        return [name for name in PARTS if name in {name for name, _ in self.of}]

    @property
    def blocks(self) -> list[int]:
        return list(range(1, 1 + max(block for _, block in self.of)))


def errors(results: Results, shown: Shown) -> Errors | NoData | NotRun:
    """Of the arm's trials that are done."""
    of = part(results, shown.sweep)
    if not of.has(shown.arm):
        return NotRun(results.scale_name)
    trials = of.trials[(of.trials["arm"] == shown.arm) & (of.trials["state"] == State.DONE)]
    rows = measured(of)
    rows = rows[rows["id"].isin(trials["id"])]
    if rows.empty:
        return NoData(f"no trial of {shown.arm} is done, with its gradients measured")
    means = rows.groupby(["part", "block"], as_index=False)[ERROR].mean()
    places = zip(means["part"].astype(str), means["block"].astype(int), strict=True)
    found = dict(zip(places, means[ERROR].astype(float), strict=True))
    return Errors(found, tuple(dict.fromkeys(rows["id"])), trials["seed"].nunique())


@figure("nvfp4", "Figure B", "Where weight gradients err most")
def gradients(results: Results) -> Picture:
    """A cell for each linear layer; the more its gradient errs, the stronger its colour."""
    found = {shown: errors(results, shown) for shown in PANELS}
    there = {shown: one for shown, one in found.items() if isinstance(one, Errors)}
    if not there:
        return next((one for one in found.values() if isinstance(one, NoData)), NotRun(results.scale_name))
    most = max(value for one in there.values() for value in one.of.values())

    def draw() -> Figure:
        sizes = [1.6 + len(one.parts) for one in there.values()]
        picture, rows = plots.panels(len(there), 1, 0.3 + 0.2 * sum(sizes), height_ratios=sizes)
        for (axes,), (shown, one) in zip(rows, there.items(), strict=True):
            cells(axes, one, most)
            axes.set_title(shown.title)
        rows[-1][0].set_xlabel("block, from the first")
        return picture

    seeds = sorted({one.seeds for one in there.values()})
    notes: tuple[str, ...] = (
        "Norm of the error over the norm of the gradient, in percent, each linear layer's own operands quantized and "
        f"not; last window of training, mean over {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}. Empty: "
        "the layer stays high.",
    )
    notes += tuple(f"{shown.title}: {one.reason}." for shown, one in found.items() if isinstance(one, NoData))
    trials = tuple(dict.fromkeys(trial for one in there.values() for trial in one.trials))
    return FigureResult(draw, trials, notes)


def cells(axes: Axes, of: Errors, most: float) -> None:
    """Blocks from left to right, parts from above, each cell's number in it."""
    shade, theme = heat.shades(), plots.theme()
    for y, name in enumerate(of.parts):
        for x in of.blocks:
            value = of.of.get((name, x), 0.0)
            if not value > 0:
                continue
            fill = shade(value / most)
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=fill, linewidth=0))
            words = f"{100 * value:.0f}" if value >= 0.0095 else f"{100 * value:.1f}"
            ink = heat.ink(fill)
            axes.text(x, y, words, ha="center", va="center_baseline", fontsize=SMALL, color=ink)
    axes.set(xlim=(0.5, len(of.blocks) + 0.5), ylim=(len(of.parts) - 0.5, -0.5))
    axes.set_yticks(range(len(of.parts)), [PARTS[name] for name in of.parts])
    axes.set_xticks(of.blocks)
    axes.tick_params(length=0)
    axes.grid(False)
    for y in range(len(of.parts) + 1):
        axes.axhline(y - 0.5, color=theme.grid, linewidth=0.6, zorder=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
