"""Metrics of NVFP4's trials that claims compare: losses before the learning rate decays, and errors of gradients.

A metric is a number for each trial, by its id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
import pandas as pd

from fewbits.analysis.engine.claims.hooks import measure, metric
from fewbits.analysis.engine.claims.pairs import formula, score_distance
from fewbits.analysis.engine.results.data import Measured
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.pairing import Metric
from fewbits.analysis.engine.statistics import extra_tokens
from fewbits.experiments.evaluation.tasks import TASK_GROUPS

LOSS, BEFORE = "validation_loss", "loss_before_decay"
LATE = ("switch", "large", "finetune")  # sweeps with late changes of the recipe; the first one that a scale has counts
LENGTHS = ("1.00", "1.25", "1.36", "1.50")  # of MXFP4's runs, in units of NVFP4's tokens
TASKS = [f"tasks.{n}.{task.metric}" for task in TASK_GROUPS["nvfp4"] if task.category != "Code" for n in task.names]
# The trunks in NVFP4 and in FP8 before the decay, and the trunk in BF16 from which they branch.
ARM, FP8, TRUNK = "nvfp4-trunk", "fp8-trunk", "trunk"
LAST_PART = 5  # the last 1/5 of the blocks, like the paper's last 4 of 20 blocks
ERROR = "gradient_error"


def gradient_errors(results: Results) -> pd.DataFrame:
    """Return a table of errors of weight gradients: id, block (from 1), part (such as qkv), gradient_error.

    The table has a row for each linear layer and trial, from the trial's last window of steps with measured gradients.
    The error is ‖g_q − g‖ / ‖g‖, where g is a layer's weight gradient, and g_q the gradient with quantized operands.
    The NVFP4 paper describes it as the error of Wgrad's output that comes from quantizing Wgrad's inputs.
    """
    numerics, columns = results.numerics(), ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    return last_windows(rows).assign(block=lambda last: last["block"] + 1)[columns]


def _errors_by_block(results: Results) -> dict[str, list[float]]:
    """Return, by trial, the mean error of the weight gradients of each block's linear layers."""
    means = gradient_errors(results).groupby(["id", "block"])[ERROR].mean()
    return {str(trial): of.tolist() for trial, of in means.groupby("id")}


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return, by trial, (mean error of weight gradients in the model's last fifth of blocks) − (mean in other blocks).

    Errors are relative, as `gradient_errors` defines them.
    """
    found = {}
    for trial, errors in _errors_by_block(results).items():
        last = max(1, round(len(errors) / LAST_PART))
        if len(errors) > last:
            found[trial] = fmean(errors[-last:]) - fmean(errors[:-last])
    return found


@metric("nvfp4", "mean_gradient_error")
def mean_gradient_error(results: Results) -> Mapping[str, float]:
    """Return the mean relative error of each trial's weight gradients over all blocks."""
    return {trial: fmean(errors) for trial, errors in _errors_by_block(results).items()}


@metric("nvfp4", BEFORE)
def loss_before_decay(results: Results) -> Mapping[str, float]:
    """Return validation losses before the learning rate decays, by trial.

    The loss of an NVFP4 or FP8 trunk is its last one. The loss of a BF16 trunk is the one at the number of tokens at
    which the NVFP4 trunk of the same seed ends. For a run with a decay of its own, it is the last one before it begins.
    """
    curves = results.curves(LOSS).drop_duplicates(["id", "tokens"])
    ends = last_windows(curves[curves["arm"].isin((ARM, FP8))])
    at = ends.loc[ends["arm"] == ARM, ["seed", "tokens"]]
    trunks = curves[curves["arm"] == TRUNK].merge(at, on=["seed", "tokens"])
    begins = {
        trial: planned.trial.training.steps * (1 - planned.trial.schedule.decay_fraction)
        for trial, planned in results.plan.trials.items()
        if planned.trial.schedule.kind == "wsd"
    }
    own = curves[curves["step"] < curves["id"].map(begins).fillna(0.0)]
    rows = pd.concat([ends, trunks, last_windows(own)])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}


# -------------------------------------------------------------------------------- numbers of several arms

Values = Mapping[str, float]


def _switches(results: Results) -> bool:
    """Return whether the scale has the sweep `switch`, whose arms branch from a run in NVFP4."""
    return "switch" in {member.cell.sweep for member in results.members}


def _losses(
    results: Results,
    sweeps: Sequence[str],
    arms: Mapping[str, str],
    combine: Callable[[Values], float],
    loss: str = LOSS,
) -> Measured:
    """Return a number that is computed from the losses of several arms of the first of the sweeps that a scale has."""
    return formula(results, {name: (sweeps, arm, loss) for name, arm in arms.items()}, combine, relative=False)


@measure("nvfp4", "N1")
def widening(results: Results) -> Mapping[str, Measured]:
    """Return by how much the relative gap to FP8 is greater after the decay than before it."""
    before, switches = loss_before_decay(results), _switches(results)
    ours, base, trunk, fp8 = ("nvfp4-long", "fp8-long", ARM, FP8) if switches else ("nvfp4", "fp8") * 2
    arms: dict[str, tuple[Sequence[str], str, Metric]] = {
        "end": (LATE, ours, LOSS),
        "base": (LATE, base, LOSS),
        "ours": (LATE, trunk, before),
        "trunk": (LATE, fp8, before),
    }
    return {"widening": formula(results, arms, lambda of: of["end"] / of["base"] - of["ours"] / of["trunk"])}


@measure("nvfp4", "N2")
def scores(results: Results) -> Mapping[str, Measured]:
    """Return the median distance of downstream scores from FP8's, in points, over all tasks except code."""
    distance = score_distance(results, ("nvfp4",), "fp8", TASKS, ("large", "recipe"))
    return {"median distance over all tasks": distance}


@measure("nvfp4", "N20")
def costs(results: Results) -> Mapping[str, Measured]:
    """Return the ratio of MXFP4's cost to NVFP4's cost, in two models; a cost is the increase of the loss over BF16."""

    def ratio(of: Values) -> float:
        return (of["mxfp4"] - of["bf16"]) / positive(of["nvfp4"] - of["bf16"])

    arms = {arm: arm for arm in ("mxfp4", "nvfp4", "bf16")}
    return {
        f"MXFP4's cost over NVFP4's, {name}": _losses(results, sweeps, arms, ratio)
        for name, sweeps in {"transformer": ("recipe", "finetune"), "hybrid": ("hybrid",)}.items()
    }


@measure("nvfp4", "N21")
def mxfp4_tokens(results: Results) -> Mapping[str, Measured]:
    """Return which fraction of its tokens MXFP4 needs in addition to reach NVFP4's loss.

    Loss is taken as linear in the logarithm of the number of tokens, with the slope of the MXFP4 runs of all lengths.
    """

    def extra(of: Values) -> float:
        slope = -float(np.polyfit(np.log([float(times) for times in LENGTHS]), [of[times] for times in LENGTHS], 1)[0])
        return extra_tokens(of[LENGTHS[0]] - of["nvfp4"], positive(slope))

    arms = {times: f"mxfp4-{times}" for times in LENGTHS} | {"nvfp4": "nvfp4-whole"}
    return {"extra tokens": _losses(results, ("scratch",), arms, extra)}


@measure("nvfp4", "N23")
def shares(results: Results) -> Mapping[str, Measured]:
    """Return which share of the gain of switching both passes the switch of the forward pass has."""

    def share(of: Values) -> float:
        return (of["none"] - of["forward"]) / positive(of["none"] - of["both"])

    none = "nvfp4-long" if _switches(results) else "nvfp4"
    arms = {"none": none, "forward": "switch-forward", "both": "switch-both"}
    return {
        "share of the gain": _losses(results, LATE, arms, share),
        "share of the gain, evaluated in BF16": _losses(results, LATE, arms, share, f"{LOSS}_unquantized"),
    }


def positive(divisor: float) -> float:
    """Return the divisor; raise ValueError unless it is positive: a ratio to no cost, or to no gain, means nothing."""
    if divisor <= 0:
        raise ValueError(f"a divisor is {divisor:.4g}, but must be positive")
    return divisor
