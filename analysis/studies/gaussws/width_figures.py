"""Draw the learned bit widths: of each layer at the end of training (Figure 5), and over training (our Figure D)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import not_planned, trial_ids
from fewbits.analysis.figures.curves import Line, Panel, curve_figure
from fewbits.analysis.figures.panels import legend, panels, rule_key
from fewbits.analysis.figures.theme import BASELINE, SMALL, STYLES, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.gaussws.widths import OURS, at_the_end, by_decay_alone, families, final_of, recorded
from fewbits.models.observer import TIERS

PARTS = {"qkv": 0, "out": 1, "up": 2, "down": 3}  # by part of a block, the index of its style in STYLES
DOTTED = (1, 2)


@figure("gaussws", "Figure 5")
def figure_5(results: Results) -> Picture:
    """Draw the mean, standard deviation and extremes of each layer's widths, for each family of models.

    Beside each panel are the shares of parameters with at most 5, 9 and 12 bits.
    """
    there = families(results)
    ended = {name: _of_ours(at_the_end(recorded(part))) for name, part in there.items()}
    ended = {name: rows for name, rows in ended.items() if not rows.empty}
    if not ended:
        return NoData("no bit widths of GaussWS") if there else not_planned(results)

    def draw() -> Figure:
        drawn, grid = panels(len(ended), 1, 0.35 + 1.9 * len(ended))
        for (axes,), (name, rows) in zip(grid, ended.items(), strict=True):
            _draw_layers(axes, rows)
            axes.set_title(f"{name}: bits at the end, by layer")
            _write_tiers(axes, there[name])
            trial = next(iter(trial_ids(there[name], OURS).values()))
            alone = by_decay_alone(there[name].plan.trials[trial].trial)
            axes.axhline(alone, color=theme().quiet, linewidth=0.9, dashes=DOTTED)
        grid[-1][0].set_xlabel("block")
        mean = Line2D([], [], color=theme().line, marker="o", mfc=theme().text, label="mean ± spread")
        extremes = Line2D([], [], color=theme().text, linewidth=1, label="least and greatest of a layer")
        legend(drawn, [mean, extremes, rule_key("by decay alone", DOTTED)])
        return drawn

    notes = (
        "Layers are in the order of the model; upright lines separate blocks. The layers of a block are qkv, out, up "
        "and down in GPT-2, and q, k, v, out, gate, up and down in Llama 2. Means are over seeds, extremes over all "
        "seeds. Right: the shares of parameters with at most 5, 9 and 12 bits, the widths that FP8 E3M4, BF16 and FP16 "
        "can represent.",
    )
    return FigureResult(draw, _ids(ended), notes)


def _of_ours(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["arm"] == OURS]


def _ids(found: dict[str, pd.DataFrame]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(key) for rows in found.values() for key in rows["id"]))


def _draw_layers(axes: Axes, rows: pd.DataFrame) -> None:
    by_place = rows.groupby("place")
    places = np.array(list(by_place.groups))
    mean, spread = by_place["bits_mean"].mean().to_numpy(), by_place["bits_std"].mean().to_numpy()
    least, greatest = by_place["bits_min"].min().to_numpy(), by_place["bits_max"].max().to_numpy()
    for tier in TIERS:
        axes.axhline(tier, color=theme().quiet, linewidth=0.7)
    of_blocks = {block: places[(by_place["block"].first() == block).to_numpy()] for block in rows["block"].unique()}
    for its in of_blocks.values():
        if its.min() > places.min():
            axes.axvline(its.min() - 0.5, color=theme().grid, linewidth=0.8)
    for extreme in (least, greatest):
        axes.plot(places, extreme, color=theme().text, linewidth=1)
    axes.vlines(places, mean - spread, mean + spread, color=theme().line, linewidth=1.6)
    axes.plot(places, mean, "o", color=theme().text, ms=2.6)
    axes.set(ylim=(min(2.0, least.min() - 0.5), max(12.6, greatest.max() + 0.5)))
    axes.set_xticks([its.mean() for its in of_blocks.values()], [str(block) for block in of_blocks])
    axes.tick_params(axis="x", length=0)
    axes.grid(False)


def _write_tiers(axes: Axes, of_sweep: Results) -> None:
    """Write, to the right of `axes`, the shares of parameters with at most 5, 9 and 12 bits at the end of training.

    of_sweep: the results of a model family's sweep, of which the arm `gaussws` is used.
    """
    if (found := final_of(of_sweep, OURS)) is not None:
        for tier in TIERS:
            words = f"≤ {tier}: {100 * found.tiers[tier]:.4g} %"
            axes.text(1.01, tier, words, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)


@figure("gaussws", "Figure D", "Bit widths over training, by part of a block")
def figure_d(results: Results) -> Picture:
    """Draw how the mean bit width of each part of a Transformer block (qkv, out, up, down) changes over training.

    Beside it, draw how the shares of parameters with at most 5, 9 and 12 bits change. There is a row of panels for each
    family of models.
    """
    found = {name: _of_ours(recorded(part)) for name, part in families(results).items()}
    there = {name: rows for name, rows in found.items() if not rows.empty}
    if not there:
        return NoData("no bit widths of GaussWS") if found else not_planned(results)

    def draw() -> Figure:
        rows = [
            [_mean_panel(name, one, name == [*there][-1]), _tier_panel(one, name == [*there][-1])]
            for name, one in there.items()
        ]
        return curve_figure(rows, height=0.45 + 1.6 * len(there), columns=6, sharex="row")

    notes = ("Means over seeds and blocks. On the right, layers are weighted by their parameters.",)
    return FigureResult(draw, _ids(there), notes)


def _mean_panel(name: str, rows: pd.DataFrame, last: bool) -> Panel:
    lines = []
    for part, one in rows.groupby("part"):
        means = one.groupby("step")["bits_mean"].mean()
        lines.append(_line(means, str(part)))
    return Panel(f"{name}: mean bits", tuple(lines), x_label="steps" * last)


def _line(values: pd.Series, part: str) -> Line:
    return Line(values.index.to_numpy(float), values.to_numpy(float), STYLES[PARTS[part]], part, points=False)


def _tier_panel(rows: pd.DataFrame, last: bool) -> Panel:
    lines = []
    for tier, width in zip(TIERS, (0.8, 1.4, 2.2), strict=True):
        weighted = (rows[f"bits_to_{tier}"] * rows["size"]).groupby(rows["step"]).sum()
        shares = weighted / rows.groupby("step")["size"].sum()
        x, y = shares.index.to_numpy(float), shares.to_numpy(float)
        lines.append(Line(x, y, BASELINE, f"≤ {tier}", points=False, width=width))
    return Panel(
        "share of parameters, %", tuple(lines), x_label="steps" * last, y_axis="percent", y_limits=(-0.04, 1.04)
    )
