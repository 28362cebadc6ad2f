"""Compute what GaussWS's claims compare: divergence and recovery of curves, and numbers of several arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import pandas as pd

from fewbits.analysis.engine.claims.hooks import measure, metric
from fewbits.analysis.engine.claims.pairs import formula
from fewbits.analysis.engine.results.data import CannotFail, Differences, Measured, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import AlsoDiverged
from fewbits.analysis.engine.results.places import not_planned, scope_of
from fewbits.analysis.studies.gaussws.metrics_widths import OURS, finals
from fewbits.sweeps.planning.store import State

LOSS = "validation_loss"
FAMILIES = {"GPT-2": "gpt2", "Llama 2": "llama2"}
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

    GPT-2 is that with λ = 0, as Llama 2, if the scale has it. The shares have no value if no width comes near 9 bits.
    """
    ends = finals(results)
    widths = {str(trial): float(mean) for trial, mean in ends["mean"].items()}
    sweep, arm = ("widths", "lambda-0") if "widths" in {m.cell.sweep for m in results.members} else ("gpt2", OURS)
    arms = {"gpt2": ((sweep,), arm, widths), "llama2": (("llama2",), OURS, widths)}
    difference: Measured = formula(results, arms, lambda of: of["gpt2"] - of["llama2"], relative=False)
    if isinstance(difference, Differences):
        difference = replace(difference, observed=True, noise=None)
    shares = {f"up to 9 bits in {name}": _up_to_nine(results, family, ends) for name, family in FAMILIES.items()}
    return {"GPT-2's mean width above Llama 2's": difference, **shares}


def _up_to_nine(results: Results, family: str, ends: pd.DataFrame) -> Measured:
    found = scope_of(results, (OURS,), (family,))
    if found is None:
        return not_planned(results)
    trials = [m.id for m in found.results.members if m.cell.arm == OURS and m.id in ends.index]
    if not trials:
        return NoData("no learned widths")
    greatest = ends["highest"][trials].max()
    if greatest < NEAR_NINE:
        return CannotFail(f"no width came near 9 bits (the greatest: {greatest:.2f})")
    return Differences(tuple(map(float, ends[9][trials])), trials=tuple(trials), observed=True)


def _cast(results: Results, form: str, keys: Mapping[str, str]) -> Mapping[str, Measured]:
    """Return the relative changes of the loss by a cast of the weights. keys: key → family of models."""
    arms = {key: f"{family}/{OURS} {LOSS}" for key, family in keys.items()}
    return {key: _ratio(results, [f"{arm}_{form}"], [f"{arm}_unquantized"]) for key, arm in arms.items()}


# Casts to the formats of the learned widths, and to three bits.
_LEARNED = {f"learned widths, {name}": family for name, family in FAMILIES.items()}
measure("gaussws", "G19")(partial(_cast, form="cast", keys=_LEARNED))
measure("gaussws", "narrow-costs")(partial(_cast, form="narrow", keys={"three bits, GPT-2": "gpt2"}))
measure("gaussws", "narrow-costs-llama2")(partial(_cast, form="narrow", keys={"three bits, Llama 2": "llama2"}))
