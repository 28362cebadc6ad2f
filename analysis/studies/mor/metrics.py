"""Compute metrics that MoR's claims compare: shares of fallbacks, errors of tensors, distances of parameter norms.

A metric is a number for each trial, by the trial's id, or a function of two trials. Errors are the mean relative
errors of tensors in E4M3, also of tensors that then stay in BF16. A scale cannot lower the error below a floor of about
2.25 %, the mean relative error of values that are all in E4M3's normal range. Metrics therefore compare excesses over
the floor: a ratio of 3 means that the error of one tensor is about three times as far above the floor as the error of
the other. Blocks of the model are counted from 1; `up` is the paper's FC1 and `down` its FC2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from statistics import fmean

import numpy as np
import pandas as pd

from fewbits.analysis.engine.claims.hooks import Between, metric
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import (
    DY,
    DY_COLUMNS,
    FC1,
    FC2,
    FORWARD,
    OUT,
    PARTS,
    QKV,
    THRESHOLD,
    X_COLUMNS,
    Seen,
    W,
    X,
    by_id,
    first_windows,
)
from fewbits.models.observer import ENTRIES

FLOOR = math.log2(math.e) / 64  # E4M3's mean relative error for log-uniform magnitudes: 1/32 · 0.5 / ln 2
LEAST = 0.0005  # added to each excess, so that two tensors near the floor (2.17 to 2.25 %) have a ratio near 1
FLUSHED = (THRESHOLD - FLOOR) / (1 - FLOOR)  # the share of flushed values that raises an error from FLOOR to THRESHOLD
# M12: the paper's model has 32 blocks, and after the ninth block no tensor of the forward pass falls back.
PAPERS_BLOCKS, NOTHING_AFTER = 32, 9
FEW = 2  # the number of blocks in the paper's Figure 18: the first ones
SHARE = (0.0, 1.0)

Numbers = Mapping[str, float]
Of = Callable[[Seen], float]


def excess(error: float) -> float:
    """Return LEAST plus the amount by which a tensor's error exceeds FLOOR; an error below FLOOR counts as FLOOR.

    FLOOR, about 2.25 %, is the mean relative error of values in E4M3's normal range. LEAST is a small constant, so that
    the ratio of two excesses is near 1 if both errors are near FLOOR.
    """
    return max(0.0, error - FLOOR) + LEAST


def is_fc2_input(block: int, part: str, slot: str) -> bool:
    return (part, slot) == (FC2, X)


def is_other_forward(block: int, part: str, slot: str) -> bool:
    return slot in FORWARD and not is_fc2_input(block, part, slot)


# -------------------------------------------------------------------------------- decisions


@metric("mor", "fallback_share", SHARE)
def fallback_share(results: Results) -> Numbers:
    return tensors.fallback_shares(tensors.tensors(results))


def _entry(place: int) -> Callable[[Results], Numbers]:
    """Return a metric: a trial's share of decisions for the quantizer with this index in the mixture."""
    return lambda results: by_id(results.numerics().groupby("id")[f"share_{place}"].mean().dropna())


for _place in range(ENTRIES):
    metric("mor", f"entry_{_place}_share", SHARE)(_entry(_place))


@metric("mor", "fallback_ratio")
def fallback_ratio(results: Results) -> Between:
    """Return a function (trial, baseline) → the trial's share of tensors in BF16, divided by the baseline's share.

    The function returns None if a share is missing or the baseline's share is 0.
    """
    shares = tensors.fallback_shares(tensors.tensors(results))

    def ratio(ours: str, baseline: str) -> float | None:
        return shares[ours] / shares[baseline] if {ours, baseline} <= set(shares) and shares[baseline] else None

    return ratio


@metric("mor", "below_threshold", SHARE)
def below_threshold(results: Results) -> Numbers:
    return tensors.below(last_windows(tensors.tensors(results)), THRESHOLD)


@metric("mor", "mean_error")
def mean_error(results: Results) -> Numbers:
    """Return the mean relative error over all tensors and windows of steps, by trial."""
    return by_id(tensors.tensors(results).groupby("id")["error"].mean())


@metric("mor", "explained_by_flushing", SHARE)
def explained_by_flushing(results: Results) -> Numbers:
    """Return how often a tensor's share of flushed values predicts correctly whether its error exceeds THRESHOLD.

    The prediction is that the error exceeds THRESHOLD (MoR's 4.5 %) if and only if the share exceeds FLUSHED. A value
    that is flushed to zero has an error of 100 %; FLUSHED is the share of such values that raises a tensor's error from
    about 2.25 %, E4M3's error without flushed values, to THRESHOLD. The metric is the mean of two shares of correct
    predictions: among tensors whose error exceeds THRESHOLD, and among all others. A trial that lacks one of these two
    kinds of tensors is left out.
    """
    found = {}
    for trial, seen in tensors.tensors(results).dropna(subset=["flushed"]).groupby("id"):
        exceeds, flushes = seen["error"] > THRESHOLD, seen["flushed"] > FLUSHED
        if exceeds.any() and not exceeds.all():
            # Both shares have equal weight, because only few tensors exceed the threshold.
            found[str(trial)] = fmean((float((flushes[exceeds]).mean()), float((~flushes[~exceeds]).mean())))
    return found


# -------------------------------------------------------------------------------- parameter norms


@metric("mor", "norm_distance")
def norm_distance(results: Results) -> Between:
    """Return a function (trial, baseline) → the greatest distance between the curves of their parameters' norms.

    A curve is the norm of all parameters over the steps of training. The distance is divided by the range (greatest
    minus least norm) of the baseline's curve including its trunk, as if the curves were compared in a plot. The
    function returns None if a trial has no curve, if the two curves have no step in common, or if the baseline's norm
    does not change.
    """
    frame = results.curves("parameter_norm").drop_duplicates(["id", "step"])
    curves = {str(trial): curve.set_index("step")["value"] for trial, curve in frame.groupby("id")}

    def line(trial: str | None) -> list[pd.Series]:
        planned = results.plan.trials.get(trial or "")
        if planned is None or trial is None:
            return []
        return [*line(planned.parent), *([curves[trial]] if trial in curves else [])]

    def distance(ours: str, baseline: str) -> float | None:
        if not {ours, baseline} <= set(curves):
            return None
        a, b = curves[ours].align(curves[baseline], join="inner")
        whole = pd.concat(line(baseline))
        span = float(whole.max() - whole.min())
        return float((a - b).abs().max()) / span if len(a) and span else None

    return distance


# -------------------------------------------------------------------------------- errors by tensor


def _register(name: str, number: Of, column: str = "error", bounds: tuple[float, float] | None = None) -> None:
    """Register the metric `name`, which `number` computes from one value for each of a trial's tensors.

    A tensor's value is a mean over the tensor's rows in the trial's last window of steps. column: the averaged column
    of the table that `tensors.tensors` returns. bounds: the smallest and the largest possible value of the metric, if
    there are such values.
    """
    metric("mor", name, bounds)(lambda results: tensors.numbers(results, number, column))


def _ratio(above: float, below: float) -> float:
    """Return the excess of the error `above` divided by that of the error `below` (see `excess`)."""
    return excess(above) / excess(below)


def early(seen: Seen) -> list[int]:
    """Return the numbers, counted from 1, of the blocks that correspond to the first 9 of the paper's 32 blocks.

    These are the first 9/32 of the model's blocks, at least one. In the MoR paper, no tensor of the forward pass falls
    back after block 9.
    """
    return seen.blocks[: max(1, round(len(seen.blocks) * NOTHING_AFTER / PAPERS_BLOCKS))]


def _mean_early(part: str, slot: str) -> Of:
    return lambda seen: fmean(seen.of(block, part, slot) for block in early(seen))


def _gradients(seen: Seen, block: int) -> float:
    return fmean(seen.of(block, part, DY) for part in PARTS)


def last_gradients(seen: Seen) -> float:
    """Return the excess of the last block's gradients divided by the greatest excess of an earlier block's gradients.

    An excess is the amount by which an error exceeds E4M3's floor of about 2.25 % (see `excess`). The errors of a
    block's gradients are averaged first. Block 1 is left out, because the MoR paper says that its gradients have high
    errors, too.
    """
    *others, end = seen.blocks
    return _ratio(_gradients(seen, end), max(_gradients(seen, block) for block in others[1:]))


def gradients_by_part(seen: Seen) -> float:
    """Return (mean excess of the gradients of qkv and FC1) / (mean excess of those of the output projection and FC2).

    An excess is the amount by which an error exceeds E4M3's floor of about 2.25 % (see `excess`). The last block is
    left out, because the MoR paper says that all its gradients have high errors.
    """
    before = seen.blocks[:-1]

    def mean(*parts: str) -> float:
        return fmean(excess(seen.of(block, part, DY)) for block, part in product(before, parts))

    return mean(QKV, FC1) / mean(OUT, FC2)


def directions(seen: Seen) -> float:
    """Return the excess of a gradient in its worse direction divided by the excess in its better direction.

    An excess is the amount by which an error exceeds E4M3's floor of about 2.25 % (see `excess`). The directions are
    rows and columns. The result is the geometric mean over the gradients of all blocks and parts.
    """
    pairs = [(seen.of(b, p, DY), seen.of(b, p, DY_COLUMNS)) for b, p in product(seen.blocks, PARTS)]
    return float(np.exp(np.mean([abs(math.log(_ratio(*pair))) for pair in pairs])))


def fc2_directions(seen: Seen) -> float:
    """Return (excess of FC2's input by rows) / (its excess by columns), the geometric mean over the first FEW blocks.

    An excess is the amount by which an error exceeds E4M3's floor of about 2.25 % (see `excess`). FEW is the number of
    blocks that MoR's Figure 18 shows.
    """
    pairs = [(seen.of(block, FC2, X), seen.of(block, FC2, X_COLUMNS)) for block in seen.blocks[:FEW]]
    return float(np.exp(np.mean([math.log(_ratio(*pair)) for pair in pairs])))


_register("fc2_input_block_1", lambda seen: seen.of(1, FC2, X))
_register("fc2_input_over_others", lambda seen: _ratio(seen.of(1, FC2, X), seen.greatest(is_other_forward)))
_register("other_forward_greatest", lambda seen: seen.greatest(is_other_forward))
_register("fc2_input_from_block_3", lambda seen: seen.greatest(lambda b, p, s: b >= 3 and is_fc2_input(b, p, s)))
_register("fc2_input_block_1_over_3", lambda seen: _ratio(seen.of(1, FC2, X), seen.of(3, FC2, X)))
_register("early_fc1_weight", _mean_early(FC1, W))
_register("early_fc2_input", _mean_early(FC2, X))
_register("early_fc2_weight", _mean_early(FC2, W))
_register(
    "later_forward_greatest",
    lambda seen: seen.greatest(lambda block, part, slot: slot in FORWARD and block not in early(seen)),
)
_register("last_gradients_ratio", last_gradients)
_register("gradients_by_part_ratio", gradients_by_part)
_register("fc1_gradient_block_1_ratio", lambda seen: _ratio(seen.of(1, FC1, DY), seen.of(2, FC1, DY)))
_register("fc2_directions_ratio", fc2_directions)
_register("gradient_directions_ratio", directions)
_register("fc2_input_least_fallback", lambda s: min(s.of(b, FC2, X) for b in s.blocks), "fallback", SHARE)


# -------------------------------------------------------------------------------- errors over training


def _over_training(name: str, part: str, slot: str, blocks: Callable[[Seen], list[int]]) -> None:
    """Register the metric `name`: the factor by which a tensor's excess grows in training.

    The excess is the amount by which the tensor's error exceeds E4M3's floor of about 2.25 % (see `excess`). The factor
    is (excess in the trial's last window) / (excess in the first window of training); a branch's training starts with
    its trunk. The metric is the smallest factor of several blocks. part, slot: identify the tensor in a block. blocks:
    returns these blocks.
    """

    def by_block(seen: Seen) -> dict[int, float]:
        return {block: seen.of(block, part, slot) for block in blocks(seen)}

    @metric("mor", name)
    def growth(results: Results) -> Numbers:
        begin = tensors.numbers(results, by_block, window=first_windows)
        found = {}
        for trial, errors in tensors.numbers(results, by_block).items():
            if start := begin.get(_root(results, trial)):
                found[trial] = min(_ratio(errors[block], start[block]) for block in errors if block in start)
        return found


def _at_start(name: str, part: str, slot: str) -> None:
    """Register the metric `name`: the error of a tensor of block 1 in the first window of training.

    A branch's training starts with its trunk. part, slot: identify the tensor in the block.
    """

    @metric("mor", name)
    def start(results: Results) -> Numbers:
        begin = tensors.numbers(results, lambda seen: seen.of(1, part, slot), window=first_windows)
        return {member.id: begin[root] for member in results.members if (root := _root(results, member.id)) in begin}


def _root(results: Results, trial: str) -> str:
    """Return the id of the trial from which all training of this trial begins: its first trunk, or itself."""
    parent = results.plan.trials[trial].parent
    return trial if parent is None else _root(results, parent)


_over_training("fc2_input_growth", FC2, X, lambda seen: [1])
_over_training("fc1_gradient_growth", FC1, DY, lambda seen: [1])
_over_training("fc2_input_growth_everywhere", FC2, X, lambda seen: seen.blocks)
_at_start("fc2_input_start", FC2, X)
_at_start("fc1_gradient_start", FC1, DY)
_register("fc1_gradient_block_1", lambda seen: seen.of(1, FC1, DY))
