"""Metrics of NVFP4's trials that claims compare: losses before the learning rate decays, and errors of gradients.

A metric is a number for each trial, by its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np
import pandas as pd

from fewbits.analysis.engine.claims.hooks import measure, metric
from fewbits.analysis.engine.claims.pairs import formula
from fewbits.analysis.engine.results.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.pairing import Metric
from fewbits.analysis.engine.results.places import pairs_of, scope_of
from fewbits.analysis.engine.statistics import extra_tokens
from fewbits.experiments.evaluation.tasks import TASK_GROUPS

LOSS, BEFORE = "validation_loss", "loss_before_decay"
LATE = ("switch", "large")  # sweeps with late changes of the recipe; the first one that a scale has counts
LENGTHS = ("1.00", "1.25", "1.36", "1.50")  # of MXFP4's runs, in units of NVFP4's tokens
TASKS = [task for task in TASK_GROUPS["nvfp4"] if task.category != "Code"]
# The trunks in NVFP4 and in FP8 before the decay, and the trunk in BF16 from which they branch.
ARM, FP8, TRUNK = "nvfp4-trunk", "fp8-trunk", "trunk"
LAST_PART = 5  # the last 1/5 of the blocks, like the paper's last 4 of 20 blocks
ERROR = "gradient_error"


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return, by trial, (mean error of weight gradients in the model's last fifth of blocks) − (mean in other blocks).

    Errors are relative, as `gradient_errors` defines them.
    """
    found = {}
    for trial, blocks in errors_by_block(results).items():
        values = [blocks[block] for block in sorted(blocks)]
        last = max(1, round(len(values) / LAST_PART))
        if len(values) > last:
            found[trial] = fmean(values[-last:]) - fmean(values[:-last])
    return found


@metric("nvfp4", "mean_gradient_error")
def mean_gradient_error(results: Results) -> Mapping[str, float]:
    """Return the mean relative error of each trial's weight gradients over all blocks."""
    return {trial: fmean(blocks.values()) for trial, blocks in errors_by_block(results).items()}


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


def errors_by_block(results: Results, part: str | None = None) -> dict[str, dict[int, float]]:
    """Return {trial id: {number of a block, from 1: mean error of the weight gradients of its linear layers}}.

    part: if given, average over only the layers of this part of a block, for example qkv.
    """
    rows = results.remembered("gradient errors", lambda: gradient_errors(results))
    means = (rows if part is None else rows[rows["part"] == part]).groupby(["id", "block"])[ERROR].mean().reset_index()
    return {
        str(trial): dict(zip(of["block"].astype(int), of[ERROR].astype(float), strict=True))
        for trial, of in means.groupby("id")
    }


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


@measure("nvfp4", "N1")
def widening(results: Results) -> Mapping[str, Measured]:
    """Return by how much the relative gap to FP8 is greater after the decay than before it."""
    before = loss_before_decay(results)
    ours, base, trunk, fp8 = ("nvfp4-long", "fp8-long", ARM, FP8)
    if "switch" not in planned_sweeps(results):
        ours, base, trunk, fp8 = ("nvfp4", "fp8", "nvfp4", "fp8")
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
    found = scope_of(results, ("nvfp4", "fp8"), ("large", "recipe"))
    if found is None:
        return {"median distance over all tasks": NotPlanned(f"not run at this scale ({results.scale_name})")}
    values, pairs = [], pairs_of(found)
    for ours, base in pairs:
        known = [found.results.numbers(f"tasks.{name}.{task.metric}") for task in TASKS for name in task.names]
        distances = [100 * abs(one[ours] - one[base]) for one in known if {ours, base} <= set(one)]
        values += [median(distances)] if distances else []
    trials = tuple(trial for pair in pairs for trial in pair)
    data = Differences(tuple(values), trials=trials, observed=True) if values else NoData("no stored scores", trials)
    return {"median distance over all tasks": data}


@measure("nvfp4", "N20")
def costs(results: Results) -> Mapping[str, Measured]:
    """Return the ratio of MXFP4's cost to NVFP4's cost, in two models; a cost is the increase of the loss over BF16."""

    def ratio(of: Values) -> float:
        return (of["mxfp4"] - of["bf16"]) / positive(of["nvfp4"] - of["bf16"])

    return {
        f"MXFP4's cost over NVFP4's, {name}": formula(
            results, {arm: ((sweep,), arm, LOSS) for arm in ("mxfp4", "nvfp4", "bf16")}, ratio, relative=False
        )
        for name, sweep in {"transformer": "recipe", "hybrid": "hybrid"}.items()
    }


@measure("nvfp4", "N21")
def mxfp4_tokens(results: Results) -> Mapping[str, Measured]:
    """Return which fraction of its tokens MXFP4 needs in addition to reach NVFP4's loss.

    Loss is taken as linear in the logarithm of the number of tokens, with the slope of the MXFP4 runs of all lengths.
    """

    def extra(of: Values) -> float:
        slope = -float(np.polyfit(np.log([float(times) for times in LENGTHS]), [of[times] for times in LENGTHS], 1)[0])
        return extra_tokens(of[LENGTHS[0]] - of["nvfp4"], positive(slope))

    arms = {times: (("scratch",), f"mxfp4-{times}", LOSS) for times in LENGTHS}
    return {
        "extra tokens": formula(results, arms | {"nvfp4": (("scratch",), "nvfp4-whole", LOSS)}, extra, relative=False)
    }


@measure("nvfp4", "N23")
def shares(results: Results) -> Mapping[str, Measured]:
    """Return which share of the gain of switching both passes the switch of the forward pass has."""
    none = "nvfp4-long" if "switch" in planned_sweeps(results) else "nvfp4"

    def share(of: Values) -> float:
        return (of["none"] - of["forward"]) / positive(of["none"] - of["both"])

    def measured(metric: str) -> Measured:
        arms = {"none": none, "forward": "switch-forward", "both": "switch-both"}
        return formula(results, {name: (LATE, arm, metric) for name, arm in arms.items()}, share, relative=False)

    return {
        "share of the gain": measured(LOSS),
        "share of the gain, evaluated in BF16": measured(f"{LOSS}_unquantized"),
    }


def planned_sweeps(results: Results) -> set[str]:
    return {member.cell.sweep for member in results.members}


def positive(divisor: float) -> float:
    """Return the divisor; raise ValueError unless it is positive: a ratio to no cost, or to no gain, means nothing."""
    if divisor <= 0:
        raise ValueError(f"a divisor is {divisor:.4g}, but must be positive")
    return divisor
