"""Compute what GaussWS's claims compare: learned bit widths (also Figure 5), curves, and numbers of several arms.

Each 32x32 square of a weight has a bit width. During training, the observer (models/observer.py) records for each layer
the mean, standard deviation and extremes of its widths, and the shares of its parameters with at most 5, 9 and 12 bits.
A number for a whole model is a mean over its layers, weighted by their numbers of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import nn

from fewbits.analysis.engine.claims.hooks import measure, metric
from fewbits.analysis.engine.claims.pairs import formula
from fewbits.analysis.engine.results.data import CannotFail, Differences, Measured, NoData
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.pairing import AlsoDiverged
from fewbits.analysis.engine.results.places import not_planned, scope_of, sweep_places, trial_ids
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


LOSS = "validation_loss"
CAST = {"GPT-2": "gpt2", "Llama 2": "llama2"}  # the families whose weights are cast after training
WIDE = "gaussws-12"  # the arm whose widths start at 12 bits
NEAR_NINE = 8.5  # bits; if the widths of no square exceed this, nothing could fail a claim about 9 bits


# -------------------------------------------------------------------------------- divergence and recovery

TENTHS = 10
RISE = 0.1  # was fixed before the first run
LOST = 1e3  # the value of `unrecovered` for a run that stopped with infinite losses


def _unrecovered(results: Results, end: float) -> Mapping[str, float]:
    """Return, by trial, how far a training loss has risen without recovering.

    It is the mean loss of the last tenth of a curve over the least mean of an earlier tenth, minus 1; above 0.02, we
    call the run diverged. end: the fraction of the training's steps at which the curve is cut.
    """
    found = AlsoDiverged()
    for trial, curve in results.curves("loss").drop_duplicates(["id", "step"]).groupby("id"):
        if (curve["state"] == State.DIVERGED).any():
            found[str(trial)] = LOST
            continue
        steps = results.plan.trials[str(trial)].trial.training.steps * end
        own = curve[curve["step"] < steps]
        means = own["value"].groupby((own["step"] * TENTHS // steps).astype(int)).mean()
        if len(means) == TENTHS:
            found[str(trial)] = float(means.iloc[-1] / means.iloc[:-1].min() - 1)
    return found


metric("gaussws", "unrecovered")(partial(_unrecovered, end=1.0))
metric("gaussws", "unrecovered_at_half")(partial(_unrecovered, end=0.5))


@metric("gaussws", "rise")
def rise(results: Results) -> Mapping[str, float]:
    """Return by trial the training loss over its trunk's, minus 1; each loss is the mean of a run's last tenth."""
    late, parents = results.late("loss"), {m.id: results.plan.trials[m.id].parent for m in results.members}
    return {key: late[key] / late[parent] - 1 for key, parent in parents.items() if parent in late and key in late}


@metric("gaussws", "left", (0.0, 1.0))
def left(results: Results) -> Mapping[str, float]:
    """Return by trial whether it leaves its trunk's level: it diverges, or its loss rises by more than RISE."""
    states = dict(zip(results.trials["id"], results.trials["state"], strict=True))
    found = {key: float(not value <= RISE) for key, value in rise(results).items() if states[key] == State.DONE}
    return AlsoDiverged(found | {key: 1.0 for key, state in states.items() if state == State.DIVERGED})


@metric("gaussws", f"{LOSS}_throughout")
def loss_throughout(results: Results) -> Mapping[str, float]:
    """Return by trial the mean validation loss over all evaluations."""
    curves = results.curves(LOSS).drop_duplicates(["id", "step"])
    return {str(trial): float(mean) for trial, mean in curves.groupby("id")["value"].mean().items()}


# -------------------------------------------------------------------------------- numbers of several arms


def _ratio(results: Results, over: Sequence[str], under: Sequence[str]) -> Measured:
    """Return (product of the losses `over`) / (product of the losses `under`) − 1, for each seed.

    A loss is "SWEEP/ARM", or "SWEEP/ARM METRIC" for a metric other than the validation loss.
    """
    arms = {}
    for name in (*over, *under):
        place, _, metric_name = name.partition(" ")
        sweep, _, arm = place.partition("/")
        arms[name] = ((sweep,), arm, metric_name or LOSS)
    return formula(results, arms, lambda of: prod(of[a] for a in over) / prod(of[b] for b in under) - 1)


@measure("gaussws", "G12")
def optimizers(results: Results) -> Mapping[str, Measured]:
    """Return comparisons of Adam-mini with AdamW: GaussWS's cost with both optimizers, and DiffQ's loss.

    AdamW's arms are those at the low learning rate if the arms with Adam-mini have that rate, as at scale paper.
    """
    rates = {_rate(results, "gpt2-mini", "adam-mini"), _rate(results, "gpt2", "bf16-low")}
    low = "-low" if len(rates) == 1 and None not in rates else ""
    mini = "gpt2-mini/adam-mini"
    return {
        "no interaction": _ratio(results, [f"{mini}-gaussws", f"gpt2/bf16{low}"], [mini, f"gpt2/gaussws{low}"]),
        "DiffQ improves": _ratio(results, [f"{mini}-diffq"], [f"gpt2/diffq{low}"]),
    }


@measure("gaussws", "G20")
def adam_mini(results: Results) -> Mapping[str, Measured]:
    """Return by how much Adam-mini's loss over AdamW's is greater with GaussWS than with BF16, in Llama 2."""
    mini = "llama2-mini/adam-mini"
    return {"Adam-mini beside AdamW": _ratio(results, [f"{mini}-gaussws", "llama2/bf16"], [mini, "llama2/gaussws"])}


def _rate(results: Results, sweep: str, arm: str) -> float | None:
    """Return an arm's learning rate; None if the plan does not have the arm."""
    trial = next((m.id for m in results.members if (m.cell.sweep, m.cell.arm) == (sweep, arm)), None)
    return None if trial is None else results.plan.trials[trial].trial.optimizer.lr


@measure("gaussws", "G15")
def narrow(results: Results) -> Mapping[str, Measured]:
    """Return the difference of GPT-2's and Llama 2's mean bit widths, and the shares of widths up to 9 bits.

    GPT-2 is that with λ = 0, as Llama 2, if the scale has it. The shares are of the arms whose widths start at 12 bits,
    if the scale has them; they have no value if widths start lower and none comes near 9 bits.
    """
    ends = finals(results)
    widths = {str(trial): float(mean) for trial, mean in ends["mean"].items()}
    sweep, arm = ("widths", "lambda-0") if "widths" in {m.cell.sweep for m in results.members} else ("gpt2", OURS)
    arms = {"gpt2": ((sweep,), arm, widths), "llama2": (("llama2",), OURS, widths)}
    difference: Measured = formula(results, arms, lambda of: of["gpt2"] - of["llama2"], relative=False)
    if isinstance(difference, Differences):
        difference = replace(difference, observed=True, noise=None)
    shares = {f"up to 9 bits in {name}": _up_to_nine(results, family, ends) for name, family in CAST.items()}
    return {"GPT-2's mean width above Llama 2's": difference, **shares}


def _up_to_nine(results: Results, family: str, ends: pd.DataFrame) -> Measured:
    arm = WIDE if WIDE in {m.cell.arm for m in results.members} else OURS
    found = scope_of(results, (arm,), (family,))
    if found is None:
        return not_planned(results)
    trials = [m.id for m in found.results.members if m.cell.arm == arm and m.id in ends.index]
    if not trials:
        return NoData("no learned widths")
    greatest = ends["highest"][trials].max()
    if arm == OURS and greatest < NEAR_NINE:
        return CannotFail(f"no width came near 9 bits (the greatest: {greatest:.2f})")
    return Differences(tuple(map(float, ends[9][trials])), trials=tuple(trials), observed=True)


def _cast(results: Results, key: str, form: str, beside: str = "unquantized") -> Mapping[str, Measured]:
    """Return the relative changes of the loss from weights in one form to weights in another one, for each family."""
    arms = {f"{key}, {name}": f"{family}/{OURS} {LOSS}" for name, family in CAST.items()}
    return {name: _ratio(results, [f"{arm}_{form}"], [f"{arm}_{beside}"]) for name, arm in arms.items()}


measure("gaussws", "G19")(partial(_cast, key="learned widths", form="cast"))


def _doses(results: Results) -> Mapping[str, Measured]:
    """Return what casts of all weights to three bits cost, and how much more they cost than casts to more bits."""
    return {
        **_cast(results, "three bits", "cast3"),
        **_cast(results, "three bits above four", "cast3", beside="cast4"),
        **_cast(results, "four bits above five", "cast4", beside="cast5"),
    }


for _name in ("narrow-costs", "narrow-costs-llama2"):
    measure("gaussws", _name)(_doses)
