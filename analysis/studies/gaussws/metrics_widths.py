"""The learned bit widths: metrics of claims, and Figure 5 (by layer, at the end).

Each 32x32 square of a weight has a bit width. During training, the observer (models/observer.py) records for each layer
the mean, standard deviation and extremes of its widths, and the shares of its parameters with at most 5, 9 and 12 bits.
A number for a whole model is a mean over its layers, weighted by their numbers of parameters.
"""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import nn

from fewbits.analysis.engine.claims.hooks import metric
from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import not_planned, sweep_places, trial_ids
from fewbits.analysis.figures.panels import legend, panels, rule_key
from fewbits.analysis.figures.theme import SMALL, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import TIERS
from fewbits.sweeps.planning.store import State

OURS = "gaussws"
FAMILIES = {"GPT-2": "gpt2", "Llama 2": "llama2", "Llama 2, 1B": "large"}  # by name, the sweep
COLUMNS = ("bits_mean", "bits_std", "bits_min", "bits_max", *(f"bits_to_{tier}" for tier in TIERS))
DASHED = (5, 2)
# The widths of a whole model: the mean, the standard deviation over all squares of all layers, the highest, and the
# shares of parameters whose width is at most 5, 9 and 12 bits.
FINALS = ("mean", "spread", "highest", *TIERS)


def recorded(results: Results) -> pd.DataFrame:
    """Return a table of widths at the end of training, with a row for each place of a finished trial and each layer.

    Rows are sorted by trial and position of the layer in the model (`place`); `size` is the layer's number of
    parameters, and COLUMNS are the observer's statistics.
    """
    return results.remembered("bit widths", lambda: _recorded(results))


def _recorded(results: Results) -> pd.DataFrame:
    frame = results.numerics()
    if frame.empty or "bits_mean" not in frame:
        return pd.DataFrame(columns=["id", "arm", "seed", "state", "step", "place", "part", "block", "size", *COLUMNS])
    frame = frame[frame["bits_mean"].notna()].drop_duplicates(["id", "step", "layer"])
    models = {trial: _layers(results.plan.trials[str(trial)].trial.model) for trial in frame["id"].unique()}
    layers = [models[trial].get(layer, (0, 0)) for trial, layer in zip(frame["id"], frame["layer"], strict=True)]
    frame = frame.assign(place=[place for place, _ in layers], size=[size for _, size in layers])
    return last_windows(frame[frame["state"] == State.DONE].sort_values(["id", "step", "place"]))


@cache
def _layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return the linear layers of all blocks by name: the position in the model, and the number of weights."""
    modules = on_meta(config).named_modules()
    linear = [(name, m) for name, m in modules if isinstance(m, nn.Linear) and name.startswith("blocks.")]
    return {name: (place, module.weight.numel()) for place, (name, module) in enumerate(linear)}


def finals(results: Results) -> pd.DataFrame:
    """Return the widths of the whole model at the end of each finished trial: a row by its id with columns FINALS."""
    ends = {str(trial): _final(rows) for trial, rows in recorded(results).groupby("id")}
    return pd.DataFrame(list(ends.values()), list(ends), FINALS)


def _final(rows: pd.DataFrame) -> tuple[float, ...]:
    def average(values: pd.Series) -> float:
        return float(np.average(values, weights=rows["size"]))

    mean = average(rows["bits_mean"])
    variance = average(rows["bits_std"] ** 2 + (rows["bits_mean"] - mean) ** 2)
    return mean, variance**0.5, rows["bits_max"].max(), *(average(rows[f"bits_to_{tier}"]) for tier in TIERS)


def bits_decay(trial: Trial) -> float:
    """Return the weight decay of the bit widths, by default that of the weights."""
    own = trial.optimizer.bits_weight_decay
    return trial.optimizer.weight_decay if own is None else own


def by_decay_alone(trial: Trial) -> float:
    """Return the final bit width that decay alone would give, if all gradients of the widths were 0."""
    steps, decay, rate = trial.training.steps, bits_decay(trial), trial.optimizer.lr * trial.optimizer.bits_lr_ratio
    left = math.prod(1 - rate * factor(trial.schedule, step, steps) * decay for step in range(steps))
    sampler = trial.recipe.sampler
    return sampler.target + (sampler.init - sampler.target) * left


def _numbers(results: Results, column: str | int) -> dict[str, float]:
    return {str(trial): float(number) for trial, number in finals(results)[column].items()}


# All widths have the same initial value and the same decay, so a spread above 0 shows that gradients move them.
for _name, _column in {"mean_width": "mean", "width_spread": "spread"}.items():
    metric("gaussws", _name)(partial(_numbers, column=_column))
for _tier, _name in zip(TIERS, ("to_five_bits", "to_nine_bits", "to_twelve_bits"), strict=True):
    metric("gaussws", _name, (0.0, 1.0))(partial(_numbers, column=_tier))


# -------------------------------------------------------------------------------- figures


@figure("gaussws", "Figure 5")
def figure_5(results: Results) -> Picture:
    """Draw the mean, standard deviation and extremes of each layer's widths, for each family of models."""
    found = {name: sweep_places(results, sweep) for name, sweep in FAMILIES.items()}
    there = {name: part for name, part in found.items() if isinstance(part, Results) and part.has(OURS)}
    frames = {name: recorded(part) for name, part in there.items()}
    ended = {name: rows for name, all_rows in frames.items() if len(rows := all_rows[all_rows["arm"] == OURS])}
    if not ended:
        return NoData("no bit widths of GaussWS") if there else not_planned(results)

    def draw() -> Figure:
        drawn, grid = panels(len(ended), 1, 0.5 + 1.9 * len(ended))
        for (axes,), (name, rows) in zip(grid, ended.items(), strict=True):
            _draw_layers(axes, rows)
            axes.set_title(f"{name}: bits at the end, by layer")
            trials, across = list(trial_ids(there[name], OURS).values()), axes.get_yaxis_transform()
            shares = finals(there[name]).reindex(trials).mean()
            for tier in TIERS:
                axes.text(
                    1.01, tier, f"≤ {tier}: {100 * shares[tier]:.4g} %", transform=across, va="center", fontsize=SMALL
                )
            alone = by_decay_alone(there[name].plan.trials[trials[0]].trial)
            axes.axhline(alone, color=theme().quiet, linewidth=0.9, dashes=DASHED)
        grid[-1][0].set_xlabel("block")
        keys = [
            Line2D([], [], color=theme().line, marker="o", mfc=theme().text, mec=theme().text, label="mean ± spread"),
            Line2D([], [], color=theme().text, linewidth=1, label="least and greatest of a layer"),
            Line2D([], [], color=theme().text, linewidth=1.2, linestyle=":", label="of a block"),
            rule_key("by decay alone", DASHED),
        ]
        legend(drawn, keys, 2)
        return drawn

    notes = (
        "Layers in the order of the model, blocks apart: qkv, out, up, down in GPT-2, and q, k, v, out, gate, up, down "
        "in Llama 2. Means are over seeds, extremes over all seeds. Right: the shares of parameters with at most 5, 9 "
        "and 12 bits, the widths that FP8 E3M4, BF16 and FP16 can represent.",
    )
    ids = tuple(dict.fromkeys(str(key) for rows in ended.values() for key in rows["id"]))
    return FigureResult(draw, ids, notes)


def _draw_layers(axes: Axes, rows: pd.DataFrame) -> None:
    layers = rows.groupby("place").agg(
        block=("block", "first"),
        mean=("bits_mean", "mean"),
        spread=("bits_std", "mean"),
        least=("bits_min", "min"),
        greatest=("bits_max", "max"),
    )
    for tier in TIERS:
        axes.axhline(tier, color=theme().quiet, linewidth=0.7)
    for _, of in layers.groupby("block"):
        ends = of.index.min() - 0.5, of.index.max() + 0.5
        axes.axvline(ends[0], color=theme().grid, linewidth=0.8)
        axes.hlines([of["least"].min(), of["greatest"].max()], *ends, color=theme().text, linewidth=1.2, linestyle=":")
        for extreme in (of["least"], of["greatest"]):
            axes.plot(of.index, extreme, color=theme().text, linewidth=1)
    axes.vlines(layers.index, layers["mean"] - layers["spread"], layers["mean"] + layers["spread"], theme().line)
    axes.plot(layers.index, layers["mean"], "o", color=theme().text, ms=2.6)
    axes.set(ylim=(min(2.0, layers["least"].min() - 0.5), max(12.6, layers["greatest"].max() + 0.5)))
    middles = layers.reset_index().groupby("block")["place"].mean()
    axes.set_xticks(list(middles), [str(block) for block in middles.index])
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.01)
    axes.grid(False)
