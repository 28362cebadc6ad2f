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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from statistics import fmean

import numpy as np
import pandas as pd
from scipy import stats

from fewbits.analysis.engine.claims.hooks import Between, measure, metric
from fewbits.analysis.engine.claims.pairs import score_distance
from fewbits.analysis.engine.results.data import Measured
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import DY, ENTRIES, FC1, FC2, OUT, PARTS, QKV, Seen, X, blocks_of, numbers

THRESHOLD = tensors.THRESHOLD
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
    """Return LEAST plus the amount by which a tensor's error exceeds FLOOR; an error below FLOOR counts as FLOOR."""
    return max(0.0, error - FLOOR) + LEAST


def _ratio(above: float, below: float) -> float:
    return excess(above) / excess(below)


# -------------------------------------------------------------------------------- decisions


@metric("mor", "fallback_share", SHARE)
def fallback_share(results: Results) -> Numbers:
    return tensors.fallback_shares(tensors.tensors(results))


def _entry(results: Results, place: int) -> Numbers:
    return tensors.by_id(results.numerics().groupby("id")[f"share_{place}"].mean().dropna())


for _place in range(ENTRIES):
    metric("mor", f"entry_{_place}_share", SHARE)(partial(_entry, place=_place))


@metric("mor", "fallback_ratio")
def fallback_ratio(results: Results) -> Between:
    """Return a function (trial, baseline) → the ratio of their shares of tensors in BF16; None if it is unknown."""
    shares = fallback_share(results)
    return lambda ours, baseline: shares[ours] / shares[baseline] if ours in shares and shares.get(baseline) else None


@metric("mor", "below_threshold", SHARE)
def below_threshold(results: Results) -> Numbers:
    """Return by trial the share of errors below THRESHOLD, which is an edge of the bins; all tensors weigh the same."""
    rows, edge = last_windows(tensors.tensors(results)), int(np.isclose(tensors.EDGES, THRESHOLD).argmax())
    under = [sum(counts[:edge]) / sum(counts) for counts in rows["histogram"]]
    return tensors.by_id(pd.Series(under, index=rows["id"], dtype=float).groupby(level=0).mean())


@metric("mor", "mean_error")
def mean_error(results: Results) -> Numbers:
    return tensors.by_id(tensors.tensors(results).groupby("id")["error"].mean())


@metric("mor", "largest_accepted")
def largest_accepted(results: Results) -> Numbers:
    """Return the greatest error that a mixture accepted, by trial; trials whose mixture has no limit are left out.

    If a window has mini-batches on both sides of the limit, the greatest accepted error is not recorded; the limit
    stands for it.
    """
    rows = tensors.tensors(results)
    taken = rows[(rows["share_0"] > 0) & rows["limit"].notna()]
    return tensors.by_id(taken[["error_max", "limit"]].min(axis=1).groupby(taken["id"]).max())


def _by_side(results: Results) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield (trial, tensors whose error exceeds THRESHOLD, all others) for trials that have both."""
    rows = tensors.tensors(results).dropna(subset=["flushed"])
    for trial, seen in rows.groupby(tensors.KEY)[["error", "flushed"]].mean().groupby("id"):
        exceeds = seen["error"] > THRESHOLD
        if exceeds.any() and not exceeds.all():
            yield str(trial), seen[exceeds], seen[~exceeds]


@metric("mor", "rescued_by_exact_zeros", SHARE)
def rescued_by_exact_zeros(results: Results) -> Numbers:
    """Return the share of tensors above THRESHOLD that would be below it if flushed values were kept exactly.

    Each flushed value has a relative error of 1, so a tensor's error is then lower by its share of flushed values.
    """
    rescued = ((trial, above["error"] - above["flushed"] < THRESHOLD) for trial, above, _ in _by_side(results))
    return {trial: float(saved.mean()) for trial, saved in rescued}


@metric("mor", "separated_by_flushing", SHARE)
def separated_by_flushing(results: Results) -> Numbers:
    """Return how often a tensor above THRESHOLD has a greater share of flushed values than one below it, by trial."""
    found = {}
    for trial, above, under in _by_side(results):
        pairs = above["flushed"].to_numpy()[:, None] - under["flushed"].to_numpy()[None, :]
        found[trial] = float((pairs > 0).mean() + (pairs == 0).mean() / 2)
    return found


# -------------------------------------------------------------------------------- downstream scores, parameter norms


def _score_distance(results: Results, arms: tuple[str, ...], where: Mapping[str, str]) -> Measured:
    names = list(filter(SCORE.fullmatch, results.metrics()))
    return score_distance(results, arms, "bf16", names, where=where)


@measure("mor", "M4")
def m4(results: Results) -> Mapping[str, Measured]:
    """Return the median distance of downstream scores from BF16's, in points, over tasks and partitions."""
    arms = ("block", "tensor", "channel")
    places = {f"configuration {one['configuration']}": one for one in (tensors.ONE, tensors.TWO)}
    return {name: _score_distance(results, arms, where) for name, where in places.items()}


@measure("mor", "M17")
def m17(results: Results) -> Mapping[str, Measured]:
    """Return the same median distance for two-way selection."""
    return {"downstream scores": _score_distance(results, ("two-way",), tensors.ONE)}


@metric("mor", "norm_distance")
def norm_distance(results: Results) -> Between:
    """Return a function (trial, baseline) → the greatest distance between the curves of their parameters' norms.

    A curve is the norm of all parameters over the steps of training. The distance is divided by the range of the
    baseline's curve including its trunk, as if the curves were compared in a plot.
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


def early(seen: Seen) -> list[int]:
    """Return the first 9/32 of the model's blocks, at least one."""
    return blocks_of(seen)[: max(1, round(len(blocks_of(seen)) * NOTHING_AFTER / PAPERS_BLOCKS))]


def _mean_early(seen: Seen, part: str, slot: str) -> float:
    return fmean(seen[block, part, slot] for block in early(seen))


def _others(seen: Seen) -> float:
    """Return the greatest error of the forward pass's tensors other than FC2's input."""
    return max(value for (_, part, slot), value in seen.items() if slot in tensors.FORWARD and (part, slot) != (FC2, X))


def _later(seen: Seen) -> float:
    """Return the greatest error of the forward pass's tensors in blocks that are not early."""
    first = early(seen)
    return max(value for (block, _, slot), value in seen.items() if slot in tensors.FORWARD and block not in first)


def last_gradients(seen: Seen) -> float:
    """Return the excess of the last block's gradients over the greatest of the others; block 1 is an exception."""
    _, *others, end = (fmean(seen[block, part, DY] for part in PARTS) for block in blocks_of(seen))
    return _ratio(end, max(others))


def gradients_by_part(seen: Seen) -> float:
    """Return (mean excess of the gradients of qkv and FC1) / (of the projection and FC2), without the last block."""
    above, under = (
        fmean(excess(seen[block, part, DY]) for block, part in product(blocks_of(seen)[:-1], parts))
        for parts in ((QKV, FC1), (OUT, FC2))
    )
    return above / under


def early_fc1_gradients(seen: Seen) -> float:
    """Return (least excess of FC1's gradient in the first 6/32 of the blocks, at least two) / (mean of the others)."""
    count = max(2, round(len(blocks_of(seen)) * FIRST_GRADIENTS / PAPERS_BLOCKS))
    excesses = [excess(seen[block, FC1, DY]) for block in blocks_of(seen)[:-1]]
    return min(excesses[:count]) / fmean(excesses[count:])


def error_by_depth(seen: Seen) -> float:
    """Return the rank correlation of a block's number and the error of its qkv and FC1 gradients, without the ends."""
    between = blocks_of(seen)[1:-1]
    errors = [fmean(seen[block, part, DY] for part in (QKV, FC1)) for block in between]
    return 0.0 if len(set(errors)) < 2 else float(stats.spearmanr(between, errors).statistic)


def directions(seen: Seen) -> float:
    """Return (excess of a gradient in its worse direction) / (in its better one), the geometric mean over gradients."""
    pairs = ((seen[b, p, DY], seen[b, p, tensors.DY_COLUMNS]) for b, p in product(blocks_of(seen), PARTS))
    return float(np.exp(np.mean([abs(math.log(_ratio(*pair))) for pair in pairs])))


def fc2_directions(seen: Seen) -> float:
    """Return (excess of FC2's input by rows) / (by columns), the geometric mean over the first FEW blocks."""
    pairs = ((seen[block, FC2, X], seen[block, FC2, tensors.X_COLUMNS]) for block in blocks_of(seen)[:FEW])
    return float(np.exp(np.mean([math.log(_ratio(*pair)) for pair in pairs])))


# Name of the metric → the function that computes it from the errors of a trial's tensors in its last window of steps.
ERRORS: dict[str, Of] = {
    "fc2_input_block_1": lambda seen: seen[1, FC2, X],
    "fc2_input_over_others": lambda seen: _ratio(seen[1, FC2, X], _others(seen)),
    "other_forward_greatest": _others,
    "fc2_input_from_block_3": lambda seen: max(seen[block, FC2, X] for block in blocks_of(seen)[2:]),
    "fc2_input_block_1_over_3": lambda seen: _ratio(seen[1, FC2, X], seen[3, FC2, X]),
    "early_fc1_weight": lambda seen: _mean_early(seen, FC1, tensors.W),
    "early_fc2_input": lambda seen: _mean_early(seen, FC2, X),
    "early_fc2_weight": lambda seen: _mean_early(seen, FC2, tensors.W),
    "later_forward_greatest": _later,
    "last_gradients_ratio": last_gradients,
    "gradients_by_part_ratio": gradients_by_part,
    "fc1_gradient_block_1": lambda seen: seen[1, FC1, DY],
    "fc1_gradient_block_1_ratio": lambda seen: _ratio(seen[1, FC1, DY], seen[2, FC1, DY]),
    "fc2_directions_ratio": fc2_directions,
    "gradient_directions_ratio": directions,
    "fc1_gradient_early_ratio": early_fc1_gradients,
    "gradient_error_depth": error_by_depth,
}
# The same for shares of decisions for BF16.
FALLBACKS: dict[str, Of] = {
    "qkv_gradient_fallback": lambda seen: fmean(seen[block, QKV, DY] for block in blocks_of(seen)),
    "fc1_gradient_fallback": lambda seen: fmean(seen[block, FC1, DY] for block in blocks_of(seen)),
    "fc2_input_least_fallback": lambda seen: min(seen[block, FC2, X] for block in blocks_of(seen)),
}
for _name, _number in ERRORS.items():
    metric("mor", _name, (-1.0, 1.0) if _number is error_by_depth else None)(partial(numbers, number=_number))
for _name, _number in FALLBACKS.items():
    metric("mor", _name, SHARE)(partial(numbers, number=_number, column="fallback"))


# -------------------------------------------------------------------------------- errors over training


def _start(results: Results, number: Of) -> Numbers:
    """Return a number of the first window of training, by trial; a branch's training starts with its trunk."""

    def root(trial: str) -> str:
        parent = results.plan.trials[trial].parent
        return trial if parent is None else root(parent)

    begin = numbers(results, number, window=tensors.first_windows)
    return {m.id: begin[root(m.id)] for m in results.members if root(m.id) in begin}


def _growth(results: Results, number: Of) -> Numbers:
    """Return by trial the factor by which an error's excess grows over training."""
    begin, end = _start(results, number), numbers(results, number)
    return {trial: _ratio(last, begin[trial]) for trial, last in end.items() if trial in begin}


for _tensor in ("fc2_input", "fc1_gradient"):
    metric("mor", f"{_tensor}_growth")(partial(_growth, number=ERRORS[f"{_tensor}_block_1"]))
    metric("mor", f"{_tensor}_start")(partial(_start, number=ERRORS[f"{_tensor}_block_1"]))
