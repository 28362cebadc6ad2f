"""Compute metrics that MoR's claims compare: shares of fallbacks, errors of tensors, distances of parameter norms.

A metric is a number for each trial, by the trial's id, or a function of two trials. Errors are the mean relative
errors of tensors in E4M3, also of tensors that then stay in BF16. A scale cannot lower the error below a floor of about
2.25 %, the mean relative error of values that are all in E4M3's normal range. Metrics therefore compare excesses over
the floor: a ratio of 3 means that the error of one tensor is about three times as far above the floor as the error of
the other. Blocks of the model are counted from 1; `up` is the paper's FC1 and `down` its FC2.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean, median

import numpy as np
import pandas as pd
from scipy import stats

from fewbits.analysis.engine.claims.hooks import Between, measure, metric
from fewbits.analysis.engine.results.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import pairs_of, scope_of
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import (
    DY,
    DY_COLUMNS,
    FC1,
    FC2,
    FORWARD,
    KEY,
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
# M12: the paper's model has 32 blocks, and after the ninth block no tensor of the forward pass falls back.
PAPERS_BLOCKS, NOTHING_AFTER = 32, 9
FEW = 2  # the number of blocks in the paper's Figure 18: the first ones
# M25: the first six of the paper's blocks, in which FC1's gradient has high errors.
FIRST_GRADIENTS = 6
SHARE = (0.0, 1.0)
SCORE = re.compile(r"tasks\.\w+\.acc(_norm)?,none")

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


def _by_side(results: Results) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield (trial, tensors whose error exceeds THRESHOLD, all others) for trials that have both."""
    rows = tensors.tensors(results).dropna(subset=["flushed"])
    for trial, seen in rows.groupby(KEY)[["error", "flushed"]].mean().groupby("id"):
        exceeds = seen["error"] > THRESHOLD
        if exceeds.any() and not exceeds.all():
            yield str(trial), seen[exceeds], seen[~exceeds]


@metric("mor", "rescued_by_exact_zeros", SHARE)
def rescued_by_exact_zeros(results: Results) -> Numbers:
    """Return the share of tensors above THRESHOLD that would be below it if flushed values were kept exactly.

    Each flushed value has a relative error of 1, so a tensor's error is then lower by its share of flushed values.
    """
    return {
        trial: float((above["error"] - above["flushed"] < THRESHOLD).mean()) for trial, above, _ in _by_side(results)
    }


@metric("mor", "separated_by_flushing", SHARE)
def separated_by_flushing(results: Results) -> Numbers:
    """Return how often a tensor above THRESHOLD has a greater share of flushed values than one below it, by trial."""
    found = {}
    for trial, above, below in _by_side(results):
        pairs = above["flushed"].to_numpy()[:, None] - below["flushed"].to_numpy()[None, :]
        found[trial] = float((pairs > 0).mean() + (pairs == 0).mean() / 2)
    return found


# -------------------------------------------------------------------------------- downstream scores


@measure("mor", "M4")
def m4(results: Results) -> Mapping[str, Measured]:
    """Return the median distance of downstream scores from BF16's, in points, over tasks and partitions."""
    arms = ("block", "tensor", "channel")
    return {f"configuration {one}": median_distance(results, arms, {"configuration": one}) for one in ("1", "2")}


@measure("mor", "M17")
def m17(results: Results) -> Mapping[str, Measured]:
    """Return the same median distance for two-way selection."""
    return {"downstream scores": median_distance(results, ("two-way",), {"configuration": "1"})}


def median_distance(results: Results, arms: Sequence[str], where: Mapping[str, str]) -> Measured:
    """Return, by seed, the median over tasks and arms of |score − BF16's score|, in points."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    ids: list[str] = []
    for arm in arms:
        found = scope_of(results, (arm, "bf16"), (), where)
        if found is None:
            return NotPlanned(f"not run at this scale ({results.scale_name})")
        seeds = {member.id: member.cell.seed for member in found.results.members}
        for ours, base in pairs_of(found):
            ids += [ours, base]
            for name in filter(SCORE.fullmatch, results.metrics()):
                scores = found.results.numbers(name)
                if {ours, base} <= set(scores):
                    by_seed[seeds[ours]].append(100 * abs(scores[ours] - scores[base]))
    values = tuple(median(one) for one in by_seed.values())
    trials = tuple(dict.fromkeys(ids))
    return Differences(values, trials=trials, observed=True) if values else NoData("no stored scores", trials)


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


def early_fc1_gradients(seen: Seen) -> float:
    """Return (least excess of FC1's gradient in the first 6/32 of the blocks) / (its mean in later blocks).

    An excess is the amount by which an error exceeds E4M3's floor (see `excess`). At least two blocks count as
    early, and the last block does not count.
    """
    count = max(2, round(len(seen.blocks) * FIRST_GRADIENTS / PAPERS_BLOCKS))
    first, later = seen.blocks[:count], seen.blocks[count:-1]
    return min(excess(seen.of(b, FC1, DY)) for b in first) / fmean(excess(seen.of(b, FC1, DY)) for b in later)


def error_by_depth(seen: Seen) -> float:
    """Return the rank correlation of a block's number and the error of its qkv and FC1 gradients, without the ends."""
    between = seen.blocks[1:-1]
    errors = [fmean(seen.of(block, part, DY) for part in (QKV, FC1)) for block in between]
    return 0.0 if len(set(errors)) < 2 else float(stats.spearmanr(between, errors).statistic)


def _mean_fallback(part: str) -> Of:
    return lambda seen: fmean(seen.of(block, part, DY) for block in seen.blocks)


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
_register("fc1_gradient_early_ratio", early_fc1_gradients)
_register("gradient_error_depth", error_by_depth, bounds=(-1.0, 1.0))
_register("qkv_gradient_fallback", _mean_fallback(QKV), "fallback", SHARE)
_register("fc1_gradient_fallback", _mean_fallback(FC1), "fallback", SHARE)
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
