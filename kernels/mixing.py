"""Choose the first entry of a mixture whose test each decision block passes (MoR algorithm 2).

Every entry quantizes the whole tensor with its own blocks and scales. This module only decides which entry's values
each decision block keeps, so entries may have blocks of any size. It makes one pass per entry over the decision blocks
that are still undecided; a backend computes the passes.
"""

import torch
from torch import Tensor

from fewbits.kernels.backends.protocol import Backend, Part
from fewbits.kernels.counts import ERROR, ERROR_ONE, LOST, NONZEROS
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
        return out, torch.zeros(amax.shape, dtype=torch.int8, device=x.device), first_counts, amax
    if amax.numel() == 1 and not backend.never_waits:
        index = _choose_one(backend, x, mixture, axis, seed, out, first_counts, partition)
        return out, torch.full(amax.shape, index, dtype=torch.int8, device=x.device), first_counts, amax
    skip = _passes(backend, x, mixture.entries[0], first_counts, axis, seed, partition, None)
    undecided = ~skip
    choice = undecided.to(torch.int8)
    if last > 1:
        choice *= last
    for index, entry in enumerate(mixture.entries[1:], 1):
        if not _any_undecided(backend, undecided):
            break
        _, counts, _ = backend.quantize(
            *(x, entry.quantizer, axis, seed), out=out, want_stats=index != last, partition=partition, skip=skip
        )
        if index < last:
            accepted = undecided & _passes(backend, x, entry, counts, axis, seed, partition, skip)
            choice.masked_fill_(accepted, index)
            skip = skip | accepted
            undecided = ~skip
    return out, choice, first_counts, amax


def _choose_one(
    backend: Backend, x: Tensor, mixture: Mixture, axis: int, seed: int, out: Tensor, counts: Tensor, partition: Part
) -> int:
    """Return the index of the entry for the only decision block, and write that entry's values to `out`.

    counts: those of the first entry, whose values `out` already holds. The decisions are those of `_passes`, but the
    numbers are Python's, which take a small part of the time of tensors with one element.
    """
    last = len(mixture.entries) - 1
    for index, entry in enumerate(mixture.entries[:last]):
        if index:
            _, counts, _ = backend.quantize(
                *(x, entry.quantizer, axis, seed), out=out, want_stats=True, partition=partition
            )
        if isinstance(entry.test, ErrorBelow):
            each = counts.flatten().tolist()
            error, limit = each[ERROR], float(each[NONZEROS]) * (entry.test.threshold * ERROR_ONE)
            accepted = each[LOST] == 0 and (error == 0 or float(error) < limit)
        else:
            accepted = bool(_passes(backend, x, entry, counts, axis, seed, partition, None))
        if accepted:
            return index
    backend.quantize(x, mixture.entries[last].quantizer, axis, seed, out=out, partition=partition)
    return last


def _passes(
    backend: Backend,
    x: Tensor,
    entry: Entry,
    counts: Tensor,
    axis: int,
    seed: int,
    partition: Part,
    skip: Tensor | None,
) -> Tensor:
    """Return True for the decision blocks that pass the entry's test, which all backends compute exactly."""
    each = counts.unbind(-1)
    error, finite = each[ERROR], each[LOST] == 0
    if isinstance(entry.test, ErrorBelow):
        # ERROR_ONE is a power of two, so the order of the two products changes no bit.
        accepted = error < each[NONZEROS].double() * (entry.test.threshold * ERROR_ONE)
    elif isinstance(entry.test, ErrorBelowOther):
        _, other_counts, _ = backend.quantize(
            *(x, entry.test.other, axis, seed), want_values=False, want_stats=True, partition=partition, skip=skip
        )
        accepted = error < other_counts[..., ERROR]
    else:
        assert isinstance(entry.test, SpreadBelow)
        source = backend.rotate(x, entry.quantizer, axis) if entry.quantizer.hadamard else x
        amax, amin = backend.extent(source, partition)
        return finite & ((amax / amin).double() < entry.test.limit_for(entry.quantizer))
    return finite & (accepted | (error == 0))


def _any_undecided(backend: Backend, undecided: Tensor) -> bool:
    """Tell whether a decision block may be undecided.

    On a GPU the answer is always True, because the host would have to wait for the GPU to know it. If all decision
    blocks are decided, the kernels that are then launched end at once.
    """
    return backend.never_waits or bool(undecided.any())
