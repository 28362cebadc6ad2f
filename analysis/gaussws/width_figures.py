"""Figure 5: each layer's bit widths at the end; and a figure of our own: how they come there."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis import plots
from fewbits.analysis.arms import ids
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.gaussws.arms import OURS
from fewbits.analysis.gaussws.widths import at_the_end, by_decay_alone, families, final_of, recorded
from fewbits.analysis.plots import LOOKS, SMALL
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.models.observer import TIERS

PARTS = {"qkv": 0, "out": 1, "up": 2, "down": 3}  # places in the order of looks


@figure("gaussws", "Figure 5")
def figure_5(results: Results) -> Picture:
    """Of each layer, over seeds: mean, spread, extremes; and the tiers' shares of all parameters."""
    there = families(results)
    ended = {name: _last(part) for name, part in there.items()}
    ended = {name: rows for name, rows in ended.items() if not rows.empty}
    if not ended:
        return NoData("no bit widths of GaussWS") if there else NotRun(results.scale_name)

    def draw() -> Figure:
        picture, grid = plots.panels(len(ended), 1, 0.35 + 1.9 * len(ended))
        for (axes,), (name, rows) in zip(grid, ended.items(), strict=True):
            _layers(axes, rows)
            axes.set_title(f"{name}: bits at the end, by layer")
            _tiers(axes, there[name])
            key = next(iter(ids(there[name], OURS).values()))
            alone = by_decay_alone(there[name].plan.trials[key].trial)
            axes.axhline(alone, color=plots.theme().quiet, linewidth=0.9, dashes=(1, 2))
        grid[-1][0].set_xlabel("block")
        handles = [
            Line2D([], [], color=plots.theme().line, marker="o", mfc=plots.theme().text, label="mean ± spread"),
            Line2D([], [], color=plots.theme().text, linewidth=1, label="least, greatest of a layer"),
            Line2D([], [], color=plots.theme().quiet, dashes=(1, 2), linewidth=0.9, label="by decay alone"),
        ]
        picture.legend(handles=handles, loc="outside upper left", ncols=3, borderpad=0.1)
        return picture

    trials = tuple(dict.fromkeys(str(key) for rows in ended.values() for key in rows["id"]))
    notes = (
        "Layers in the order of the model, block by block (upright lines): qkv, out, up, down in GPT-2, q, k, v, out, "
        "gate, up, down in Llama 2. Means over seeds; extremes are of all seeds. Right: the share of parameters up to "
        "5, 9 and 12 bits, the widths that FP8 E3M4, BF16 and FP16 hold.",
    )
    return FigureResult(draw, trials, notes)


def _last(part: Results) -> pd.DataFrame:
    rows = recorded(part)
    return at_the_end(rows[rows["arm"] == OURS])


def _layers(axes: Axes, rows: pd.DataFrame) -> None:
    theme = plots.theme()
    by_place = rows.groupby("place")
    places = np.array(list(by_place.groups))
    mean, spread = by_place["bits_mean"].mean().to_numpy(), by_place["bits_std"].mean().to_numpy()
    least, greatest = by_place["bits_min"].min().to_numpy(), by_place["bits_max"].max().to_numpy()
    for tier in TIERS:
        axes.axhline(tier, color=theme.quiet, linewidth=0.7)
    of_blocks = {block: places[(by_place["block"].first() == block).to_numpy()] for block in rows["block"].unique()}
    for its in of_blocks.values():
        if its.min() > places.min():
            axes.axvline(its.min() - 0.5, color=theme.grid, linewidth=0.8)
    axes.plot(places, least, color=theme.text, linewidth=1)
    axes.plot(places, greatest, color=theme.text, linewidth=1)
    axes.vlines(places, mean - spread, mean + spread, color=theme.line, linewidth=1.6)
    axes.plot(places, mean, "o", color=theme.text, ms=2.6)
    axes.set(ylim=(min(2.0, least.min() - 0.5), max(12.6, greatest.max() + 0.5)))
    axes.set_xticks([its.mean() for its in of_blocks.values()], [str(block) for block in of_blocks])
    axes.tick_params(axis="x", length=0)
    axes.grid(False)


def _tiers(axes: Axes, part: Results) -> None:
    found = final_of(part, OURS)
    if found is None or isinstance(found, NotRun):
        return
    for tier in TIERS:
        words = f"≤ {tier}: {100 * found.tiers[tier]:.4g} %"
        axes.text(1.01, tier, words, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)


@figure("gaussws", "Figure D", "How bit widths move, by part")
def figure_d(results: Results) -> Picture:
    there = {name: recorded(part) for name, part in families(results).items()}
    there = {name: rows[rows["arm"] == OURS] for name, rows in there.items()}
    there = {name: rows for name, rows in there.items() if not rows.empty}
    if not there:
        return NoData("no bit widths of GaussWS") if families(results) else NotRun(results.scale_name)

    def draw() -> Figure:
        picture, grid = plots.panels(len(there), 2, 0.45 + 1.6 * len(there), sharex="row")
        for (left, right), (name, rows) in zip(grid, there.items(), strict=True):
            _moving(left, rows)
            left.set_title(f"{name}: mean bits")
            _shares(right, rows)
            right.set_title("share of parameters, %")
        for axes in grid[-1]:
            axes.set_xlabel("steps")
        parts = [part for part in PARTS if any(part in set(rows["part"]) for rows in there.values())]
        handles = [Line2D([], [], color=LOOKS[PARTS[p]].shade, dashes=LOOKS[PARTS[p]].dashes, label=p) for p in parts]
        handles += [
            Line2D([], [], color=plots.theme().text, linewidth=w, label=f"≤ {t}") for t, w in TIER_LINES.items()
        ]
        picture.legend(handles=handles, loc="outside upper left", ncols=6, borderpad=0.1)
        return picture

    trials = tuple(dict.fromkeys(str(key) for rows in there.values() for key in rows["id"]))
    return FigureResult(draw, trials, ("Means over seeds and blocks; layers count by their parameters on the right.",))


TIER_LINES = dict(zip(TIERS, (0.8, 1.4, 2.2), strict=True))


def _moving(axes: Axes, rows: pd.DataFrame) -> None:
    for part, one in rows.groupby("part"):
        means = one.groupby("step")["bits_mean"].mean()
        look = LOOKS[PARTS[str(part)]]
        few = "" if len(means) > 1 else look.marker
        axes.plot(means.index, means, color=look.shade, dashes=look.dashes or (None, None), marker=few)


def _shares(axes: Axes, rows: pd.DataFrame) -> None:
    for tier, width in TIER_LINES.items():
        weighted = (rows[f"bits_to_{tier}"] * rows["size"]).groupby(rows["step"]).sum()
        shares = weighted / rows.groupby("step")["size"].sum()
        axes.plot(
            shares.index, shares, color=plots.theme().text, linewidth=width, marker="" if len(shares) > 1 else "o"
        )
    axes.set_ylim(-0.04, 1.04)
    axes.yaxis.set_major_formatter(plots.percent())
