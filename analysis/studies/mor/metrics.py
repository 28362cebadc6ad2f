"""Numbers of MoR's trials that claims compare: what falls back, which tensors err, and how parameter norms part.

Errors are those of E4M3 before the decision. They are judged by their excess over E4M3's floor, 2.25 %: the mean
relative error of values that are all in the normal range, which no scale can lower (facts 1.0). Ratios of excesses say
how much more one tensor departs from the floor than another; LEAST keeps two tensors at the floor at a ratio of 1.
Blocks are counted from 1; `up` is the paper's FC1 and `down` its FC2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from statistics import fmean

import numpy as np
import pandas as pd

from fewbits.analysis.engine.frames import Results, last_windows
from fewbits.analysis.engine.hooks import Between, metric
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

FLOOR = math.log2(math.e) / 64  # of E4M3, log-uniform magnitudes: 1/32 · 0.5 / ln 2
LEAST = 0.0005  # a twentieth of a percentage point: two floors differ by less than that (2.17 to 2.25 %)
FLUSHED = (THRESHOLD - FLOOR) / (1 - FLOOR)  # share of values flushed to zero that alone lifts the error to it
PAPERS_BLOCKS, NOTHING_AFTER = 32, 9  # M12: of as many blocks, none falls back after this one
FEW = 2  # first blocks that Figure 18 shows
SHARE = (0.0, 1.0)

Numbers = Mapping[str, float]
Of = Callable[[Seen], float]


def excess(error: float) -> float:
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
    """Return how a trial's share of decisions for one entry of its mixture is read."""
    return lambda results: by_id(results.numerics().groupby("id")[f"share_{place}"].mean().dropna())


for _place in range(ENTRIES):
    metric("mor", f"entry_{_place}_share", SHARE)(_entry(_place))


@metric("mor", "fallback_ratio")
def fallback_ratio(results: Results) -> Between:
    """Return how the first trial's share of tensors in BF16 relates to the second's."""
    shares = tensors.fallback_shares(tensors.tensors(results))

    def ratio(ours: str, baseline: str) -> float | None:
        return shares[ours] / shares[baseline] if {ours, baseline} <= set(shares) and shares[baseline] else None

    return ratio


@metric("mor", "below_threshold", SHARE)
def below_threshold(results: Results) -> Numbers:
    return tensors.below(last_windows(tensors.tensors(results)), THRESHOLD)


@metric("mor", "mean_error")
def mean_error(results: Results) -> Numbers:
    """Return each trial's mean relative error over all tensors and windows."""
    return by_id(tensors.tensors(results).groupby("id")["error"].mean())


@metric("mor", "explained_by_flushing", SHARE)
def explained_by_flushing(results: Results) -> Numbers:
    """Return the share of tensors for which flushed values alone say whether the error exceeds the threshold.

    A value that is flushed to zero has an error of 100 %, so a share of FLUSHED of them lifts a tensor from E4M3's
    floor to the threshold. Only trials count in which some tensors exceed it and some do not, by windows.
    """
    found = {}
    for trial, seen in tensors.tensors(results).dropna(subset=["flushed"]).groupby("id"):
        exceeds, flushes = seen["error"] > THRESHOLD, seen["flushed"] > FLUSHED
        if exceeds.any() and not exceeds.all():
            # Each class counts alike, so that a few tensors among many that do not fall back are not outvoted.
            found[str(trial)] = fmean((float((flushes[exceeds]).mean()), float((~flushes[~exceeds]).mean())))
    return found


# -------------------------------------------------------------------------------- parameter norms


@metric("mor", "norm_distance")
def norm_distance(results: Results) -> Between:
    """Return how far two trials' parameter norms part at most, as a share of the range that the second covers over its
    whole line of training: what a reader sees of two curves in one plot."""
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
    metric("mor", name, bounds)(lambda results: tensors.numbers(results, number, column))


def _ratio(above: float, below: float) -> float:
    return excess(above) / excess(below)


def early(seen: Seen) -> list[int]:
    """Return as large a part of our first blocks as 9 are of the paper's 32."""
    return seen.blocks[: max(1, round(len(seen.blocks) * NOTHING_AFTER / PAPERS_BLOCKS))]


def _mean_early(part: str, slot: str) -> Of:
    return lambda seen: fmean(seen.of(block, part, slot) for block in early(seen))


def _gradients(seen: Seen, block: int) -> float:
    return fmean(seen.of(block, part, DY) for part in PARTS)


def last_gradients(seen: Seen) -> float:
    """Block 1, which is said to stand out, is no measure for the last block."""
    *others, end = seen.blocks
    return _ratio(_gradients(seen, end), max(_gradients(seen, block) for block in others[1:]))


def gradients_by_part(seen: Seen) -> float:
    """All blocks but the last, of which the paper says that all gradients are high."""
    before = seen.blocks[:-1]

    def mean(*parts: str) -> float:
        return fmean(excess(seen.of(block, part, DY)) for block, part in product(before, parts))

    return mean(QKV, FC1) / mean(OUT, FC2)


def directions(seen: Seen) -> float:
    """The geometric mean, over gradients, of the worse direction's excess over the better one's."""
    pairs = [(seen.of(b, p, DY), seen.of(b, p, DY_COLUMNS)) for b, p in product(seen.blocks, PARTS)]
    return float(np.exp(np.mean([abs(math.log(_ratio(*pair))) for pair in pairs])))


def fc2_directions(seen: Seen) -> float:
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
    """Register the least growth of a tensor over these blocks: its excess at the end of a trial over that in the first
    window of its line, which is the trunk's where arms branch."""

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
    """Register block 1's error in the first window of a trial's line."""

    @metric("mor", name)
    def start(results: Results) -> Numbers:
        begin = tensors.numbers(results, lambda seen: seen.of(1, part, slot), window=first_windows)
        return {member.id: begin[root] for member in results.members if (root := _root(results, member.id)) in begin}


def _root(results: Results, trial: str) -> str:
    parent = results.plan.trials[trial].parent
    return trial if parent is None else _root(results, parent)


_over_training("fc2_input_growth", FC2, X, lambda seen: [1])
_over_training("fc1_gradient_growth", FC1, DY, lambda seen: [1])
_over_training("fc2_input_growth_everywhere", FC2, X, lambda seen: seen.blocks)
_at_start("fc2_input_start", FC2, X)
_at_start("fc1_gradient_start", FC1, DY)
_register("fc1_gradient_block_1", lambda seen: seen.of(1, FC1, DY))
