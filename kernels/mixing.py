"""Choose, for each decision block, the first entry of a mixture whose test the block passes (MoR algorithm 2).

The blocks and scales of every entry are those of the whole tensor, whatever the decision blocks are. This module only
decides which entry's values each decision block keeps, so entries may have blocks of any size. For each entry, a
backend visits only the decision blocks for which no entry is chosen yet.
"""

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.backends.protocol import ERROR, ERROR_ONE, Backend, Part
from fewbits.kernels.quantizer import Entry, ErrorBelow, ErrorBelowOther, Mixture, SpreadBelow


def mix_matrix(
    backend: Backend, x: Tensor, mixture: Mixture, axis: int, seed: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize x by a mixture, and return (values, choice, counts, amax).

    `values` has the shape of x; the other results have one entry for each decision block, [blocks down, blocks across].
    `choice` is the int8 index of the chosen entry. `counts` [..., 7] are the sum of the relative errors and the numbers
    of non-zero, flushed, saturated, capped, non-finite and lost elements (arithmetic.md, "Statistics"). They describe
    the values of the first entry, even where another entry is chosen. `amax` is the largest magnitude of x in the
    block, after the Hadamard transform if there is one.

    axis: −1 for blocks along the rows, 0 for blocks down the columns. seed: the seed of every entry's random numbers.
    out: the tensor to write the values to; it must not overlap x.
    """
    partition = mixture.decision_block.resolve(x.shape, axis)
    out = torch.empty_like(x) if out is None else out
    last = len(mixture.entries) - 1
    _, first_counts, amax = backend.quantize(
        x, mixture.entries[0].quantizer, axis, seed, out=out, want_stats=True, partition=partition
    )
    if not last:
        return out, torch.zeros_like(amax, dtype=torch.int8), first_counts, amax
    choice, decided = torch.empty_like(amax, dtype=torch.int8), torch.empty_like(amax, dtype=torch.bool)
    counts = first_counts
    for index, entry in enumerate(mixture.entries[:last]):
        skip = decided if index else None
        if index:
            _, counts, _ = backend.quantize(
                *(x, entry.quantizer, axis, seed), out=out, want_stats=True, partition=partition, skip=skip
            )
        arguments: dict[str, Any] = {"counts": counts, "choice": choice, "decided": decided}
        arguments |= _compared(backend, x, entry, axis, seed, partition, skip, out, counts)
        if not backend.decide(index, last, **arguments):
            return out, choice, first_counts, amax
    # If there is a single block, and the host has read that it is undecided, no block has to be skipped.
    skip = None if amax.numel() == 1 and not backend.never_waits else decided
    backend.quantize(x, mixture.entries[last].quantizer, axis, seed, out=out, partition=partition, skip=skip)
    return out, choice, first_counts, amax


def _compared(
    backend: Backend,
    x: Tensor,
    entry: Entry,
    axis: int,
    seed: int,
    partition: Part,
    skip: Tensor | None,
    values: Tensor,
    counts: Tensor,
) -> dict[str, Any]:
    """Return the keyword arguments that Backend.decide needs for the entry's test.

    For ErrorBelow this is `limit`. For ErrorBelowOther it is `other`, the statistics of each decision block (as
    `counts` in `mix_matrix`) for the values of the test's other quantizer; or, for other errors than the relative one,
    `counts` with an error of 0 where the test passes and 1 where it does not. For SpreadBelow they are `limit` and
    `extent`, the largest and the smallest non-zero magnitude of each decision block.

    axis, seed: the same as for `mix_matrix`, which quantizes the entries. partition: (rows, columns) of a decision
    block. skip: True for each decision block that is already decided; None: no block is. values, counts: those of the
    entry.
    """
    if isinstance(entry.test, ErrorBelow):
        return {"limit": entry.test.threshold * ERROR_ONE}
    if isinstance(entry.test, ErrorBelowOther) and entry.test.by != "error":
        source = backend.rotate(x, entry.quantizer, axis) if entry.quantizer.hadamard else x
        other = backend.quantize(x, entry.test.other, axis, seed)[0]
        counts = counts.clone()
        counts[..., ERROR] = backend.compare(source, values, other, partition, entry.test.by)
        return {"counts": counts}
    if isinstance(entry.test, ErrorBelowOther):
        _, counts, _ = backend.quantize(
            *(x, entry.test.other, axis, seed), want_values=False, want_stats=True, partition=partition, skip=skip
        )
        return {"other": counts}
    assert isinstance(entry.test, SpreadBelow)
    source = backend.rotate(x, entry.quantizer, axis) if entry.quantizer.hadamard else x
    return {"limit": entry.test.limit_for(entry.quantizer), "extent": backend.extent(source, partition)}
