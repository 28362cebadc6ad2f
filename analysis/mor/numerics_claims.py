"""What MoR says of tensors: which of them have large errors, where in the network and when (M11 to M16, M20).

Errors are those of E4M3 before the decision, by tensor, in the last window of training unless another is said. The
paper's blocks are numbered from 1 of 32; ours too, and where it says `block 1` or `the third block` so do we, however
many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from statistics import fmean

from fewbits.analysis.arms import decided, having, ids, own, seed_by_seed
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.mor.arms import ONE, TWO
from fewbits.analysis.mor.claims import margin
from fewbits.analysis.registry import claim
from fewbits.analysis.studies.mor.tensors import (
    DY,
    DY_COLUMNS,
    FC1,
    FC2,
    FORWARD,
    OUT,
    PARTS,
    QKV,
    X_COLUMNS,
    Seen,
    W,
    X,
    below,
    first,
    in_each_trial,
    last,
    looked_at,
    numbers,
)
from fewbits.analysis.verdicts import Verdict, every, higher, lower, not_run, noted, share_within

THRESHOLD = paper("mor").numbers["threshold"].value
PAPERS_BLOCKS, NOTHING_AFTER = 32, 9  # M12: of as many blocks, none falls back after this one
FEW = 2  # first blocks that Figure 18 shows
Number = Callable[[Seen], float]


def is_fc2_input(block: int, part: str, slot: str) -> bool:
    return (part, slot) == (FC2, X)


def is_other_forward(block: int, part: str, slot: str) -> bool:
    return slot in FORWARD and not is_fc2_input(block, part, slot)


@claim("mor", "M11")
def m11(results: Results) -> Verdict:
    """Third and later blocks: where fewer than three are, there is no such number and no verdict."""

    def from_third(seen: Seen) -> float:
        return seen.greatest(lambda block, part, slot: block >= 3 and is_fc2_input(block, part, slot))

    above: Mapping[str, Number] = {
        "FC2's input in block 1 above all other forward tensors": lambda seen: (
            seen.of(1, FC2, X) - seen.greatest(is_other_forward)
        ),
        "FC2's input in block 1 above that in block 3": lambda seen: seen.of(1, FC2, X) - seen.of(3, FC2, X),
    }
    parts = {name: _higher(results, "block", number, margin("M11")) for name, number in above.items()}
    parts["FC2's input in block 1 above the threshold"] = _higher(
        results, "block", lambda seen: seen.of(1, FC2, X) - THRESHOLD
    )
    parts["all other forward tensors below it"] = _lower(
        results, "block", lambda seen: seen.greatest(is_other_forward) - THRESHOLD
    )
    parts["FC2's input below it from block 3 on"] = _lower(results, "block", lambda seen: from_third(seen) - THRESHOLD)
    return _all(results, "block", parts)


@claim("mor", "M12")
def m12(results: Results) -> Verdict:
    """Early: as large a part of our blocks as 9 are of 32."""
    if having(results, "block", where=TWO) is None:
        return noted(not_run(results.scale_name), "configuration 2 is not run")

    def early(seen: Seen) -> list[int]:
        return seen.blocks[: max(1, round(len(seen.blocks) * NOTHING_AFTER / PAPERS_BLOCKS))]

    def mean_early(part: str, slot: str) -> Number:
        return lambda seen: fmean(seen.of(block, part, slot) for block in early(seen))

    def later(seen: Seen) -> float:
        return seen.greatest(lambda block, part, slot: slot in FORWARD and block not in early(seen)) - THRESHOLD

    tensors = {"FC1's weight": (FC1, W), "FC2's activation": (FC2, X), "FC2's weight": (FC2, W)}
    parts = {
        f"{name} in early blocks": higher(
            seed_by_seed(results, numbers(results, mean_early(*tensor)), ("block", TWO), ("block", ONE)), margin("M12")
        )
        for name, tensor in tensors.items()
    }
    parts["no forward tensor falls back in later blocks"] = decided(
        in_each_trial(results, "block", later, where=TWO), lower
    )
    return noted(every(parts), "early blocks: as large a part of ours as 9 are of the paper's 32")


@claim("mor", "M13")
def m13(results: Results) -> Verdict:
    """Block 1, which is said to stand out, is no measure for the last block."""

    def of_block(seen: Seen, block: int) -> float:
        return fmean(seen.of(block, part, DY) for part in PARTS)

    def last_above(seen: Seen) -> float:
        *others, end = seen.blocks
        return of_block(seen, end) - max(of_block(seen, block) for block in others[1:])

    def by_part(seen: Seen) -> float:
        def mean(*parts: str) -> float:
            return fmean(seen.of(block, part, DY) for block, part in product(seen.blocks, parts))

        return mean(QKV, FC1) - mean(OUT, FC2)

    above: Mapping[str, Number] = {
        "the last block's gradients above those of every block from the second on": last_above,
        "gradients of qkv and FC1 above those of the projection and FC2": by_part,
        "FC1's gradient in block 1 above that in block 2": lambda seen: seen.of(1, FC1, DY) - seen.of(2, FC1, DY),
    }
    parts = {name: _higher(results, "block", number, margin("M13")) for name, number in above.items()}
    return _all(results, "block", parts)


@claim("mor", "M14")
def m14(results: Results) -> Verdict:
    """From the first window of training, which is the trunk's where arms branch, to the arm's last."""
    start = "block" if having(results, "trunk", where=ONE) is None else "trunk"
    tensors = {"FC2's activation": (FC2, X), "FC1's gradient": (FC1, DY)}
    parts: dict[str, Verdict] = {}
    if having(results, "block", where=ONE) is not None:
        for name, tensor in tensors.items():
            parts |= _grows(results, name, start, *tensor)
    return _all(results, "block", parts)


def _grows(results: Results, name: str, start: str, part: str, slot: str) -> dict[str, Verdict]:
    def error(seen: Seen) -> float:
        return seen.of(1, part, slot)

    begin, end, starts = numbers(results, error, window=first), numbers(results, error), ids(results, start, where=ONE)
    growth = {
        i: end[i] - begin[starts[seed]]
        for seed, i in ids(results, "block", where=ONE).items()
        if i in end and starts.get(seed) in begin
    }
    begins = in_each_trial(results, start, lambda seen: error(seen) - THRESHOLD, window=first)
    return {
        f"{name} begins below the threshold": decided(begins, lower),
        f"{name} grows": decided(own(results, growth, "block", where=ONE), lambda found: higher(found, margin("M14"))),
        f"{name} ends above the threshold": _higher(results, "block", lambda seen: error(seen) - THRESHOLD),
    }


@claim("mor", "M15")
def m15(results: Results) -> Verdict:
    """Rows run along the features, columns down the tokens."""

    def fc2_columns(seen: Seen) -> float:
        return fmean(seen.of(block, FC2, X_COLUMNS) - seen.of(block, FC2, X) for block in seen.blocks[:FEW])

    def gradients_apart(seen: Seen) -> float:
        places = product(seen.blocks, PARTS)
        return fmean(abs(seen.of(block, part, DY) - seen.of(block, part, DY_COLUMNS)) for block, part in places)

    least = margin("M15")
    columns = in_each_trial(results, "channel", fc2_columns)
    parts = {
        "FC2's activation by columns below that by rows, in the first two blocks": decided(
            columns, lambda found: lower(found, least, absence_contradicts=True)
        ),
        "one direction of each gradient below the other, on average": decided(
            in_each_trial(results, "channel", gradients_apart),
            lambda found: higher(found, least, absence_contradicts=True),
        ),
    }
    return noted(
        _all(results, "channel", parts),
        "the paper shows gradients of the first and last four blocks of 32; ours are all blocks",
    )


@claim("mor", "M16")
def m16(results: Results) -> Verdict:
    """In the block where it falls back least."""

    def least(seen: Seen) -> float:
        return min(seen.of(block, FC2, X) for block in seen.blocks)

    shares = in_each_trial(results, "tensor", least, column="fallback")
    return decided(shares, lambda found: higher(found, margin("M16"), absence_contradicts=True))


@claim("mor", "M20")
def m20(results: Results) -> Verdict:
    said, one = paper("mor").numbers["threshold-share"].value, having(results, "watched", where=ONE)
    if one is None:
        return not_run(results.scale_name)
    shares = one.sample(below(last(looked_at(one)), THRESHOLD), "watched", ONE)
    verdict = share_within(shares, said - margin("M20"), said + margin("M20"))
    return noted(verdict, "of BF16's own tensors in its last window, by the error that 128×128 blocks would have made")


# -------------------------------------------------------------------------------- details


def _higher(results: Results, arm: str, number: Number, least: float = 0.0) -> Verdict:
    return decided(in_each_trial(results, arm, number), lambda found: higher(found, least))


def _lower(results: Results, arm: str, number: Number, least: float = 0.0) -> Verdict:
    return decided(in_each_trial(results, arm, number), lambda found: lower(found, least))


def _all(results: Results, arm: str, parts: Mapping[str, Verdict]) -> Verdict:
    return not_run(results.scale_name) if having(results, arm, where=ONE) is None else every(parts)
