"""Choose the first entry of a mixture whose test each decision block passes (MoR algorithm 2).

Every entry quantizes the whole tensor with its own blocks and scales. This module only decides which entry's values
each decision block keeps, so entries may have blocks of any size. It makes one pass per entry over the decision blocks
that are still undecided; a backend computes the passes.
"""

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.backends.protocol import Backend, Part
from fewbits.kernels.counts import ERROR_ONE
from fewbits.kernels.quantizer import Entry, ErrorBelow, ErrorBelowOther, Mixture, SpreadBelow


def mix_matrix(
    backend: Backend, x: Tensor, mixture: Mixture, axis: int, seed: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the values; and, for each decision block, the index of its entry and the first entry's counts and amax.

    out: the tensor to write the values to; it does not overlap x.
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
        compared = _compared(backend, x, entry, axis, seed, partition, skip)
        if not backend.decide(index, last, counts, choice, decided, **compared):
            return out, choice, first_counts, amax
    # A single block that the host knows to be undecided needs no test for each of its elements.
    skip = None if amax.numel() == 1 and not backend.never_waits else decided
    backend.quantize(x, mixture.entries[last].quantizer, axis, seed, out=out, partition=partition, skip=skip)
    return out, choice, first_counts, amax


def _compared(
    backend: Backend, x: Tensor, entry: Entry, axis: int, seed: int, partition: Part, skip: Tensor | None
) -> dict[str, Any]:
    """Return the arguments of Backend.decide that say what the entry's test compares with."""
    if isinstance(entry.test, ErrorBelow):
        return {"limit": entry.test.threshold * ERROR_ONE}
    if isinstance(entry.test, ErrorBelowOther):
        _, counts, _ = backend.quantize(
            *(x, entry.test.other, axis, seed), want_values=False, want_stats=True, partition=partition, skip=skip
        )
        return {"other": counts}
    assert isinstance(entry.test, SpreadBelow)
    source = backend.rotate(x, entry.quantizer, axis) if entry.quantizer.hadamard else x
    return {"limit": entry.test.limit_for(entry.quantizer), "extent": backend.extent(source, partition)}
