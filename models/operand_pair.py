"""Quantize a tensor that two GEMMs read along different axes, with as few passes as possible."""

from collections.abc import Callable

import torch
from torch import Tensor

from fewbits.kernels.quantizer import Mixture, Quantizer, with_signs
from fewbits.models.recipe import Slot

Record = Callable[[str, Tensor, Tensor | None], None]  # slot, counts, choice of a mixture


class OperandPair:
    """The two slots of one tensor, which quantize it for its first and its second GEMM.

    seed(name): returns the seed for a slot's stochastic rounding, or for a GEMM's signs, which both its operands share
    if the signs are drawn for every GEMM (`signs=each`).
    record(name, counts, choice): receives the statistics of every mixture, which cost nothing more, and with `watch`
    also those of every quantizer.
    """

    def __init__(self, first: Slot, second: Slot, names: tuple[str, str]) -> None:
        self.first, self.second = first, second
        self.names = names
        self.shared = first.equals(second)
        specs = [slot.spec for slot in (first, second) if slot.spec is not None]
        self.draws_signs = any(spec.draws_signs for spec in specs)
        self.needs_seed = self.draws_signs or any(spec.needs_seed for spec in specs)
        plain = not isinstance(first.spec, Mixture) and not isinstance(second.spec, Mixture)
        self._one_read = plain and not self.shared and (first.axis, second.axis) == (-1, 0)
        if first.spec is None or second.spec is None:
            self._one_read = False

    def __call__(
        self, x: Tensor, seed: Callable[[str], int], record: Record | None = None, *, watch: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self._one_read and not (record and watch):
            assert self.first.spec is not None
            assert self.second.spec is not None
            return torch.ops.fewbits.quantize_both(
                x,
                _resolve_spelling(self.first.spec, self.names[0], seed),
                _resolve_spelling(self.second.spec, self.names[1], seed),
                *map(seed, self.names),
            )
        values = self.quantize_one(0, x, seed, record, watch=watch)
        return values, values if self.shared else self.quantize_one(1, x, seed, record, watch=watch)

    def quantize_one(
        self, which: int, x: Tensor, seed: Callable[[str], int], record: Record | None = None, *, watch: bool = False
    ) -> Tensor:
        """Return the values that the first GEMM (which=0) or the second (1) reads."""
        slot, name = (self.first, self.second)[which], self.names[0 if self.shared else which]
        spec = slot.spec
        if spec is None:
            return x
        spelling = _resolve_spelling(spec, name, seed)
        if isinstance(spec, Mixture):
            values, choice, counts, _ = torch.ops.fewbits.mix(x, spelling, slot.axis, seed(name))
            if record:
                record(name, counts, choice)
            return values
        if spelling == "bf16" and x.dtype == torch.bfloat16:
            return x  # casting to its own format changes nothing
        if record and watch:
            values, counts, _ = torch.ops.fewbits.quantize_stats(x, spelling, slot.axis, seed(name), False)
            record(name, counts, None)
            return values
        return torch.ops.fewbits.quantize(x, spelling, slot.axis, seed(name))


def _resolve_spelling(spec: Quantizer | Mixture, slot: str, seed: Callable[[str], int]) -> str:
    gemm = slot.partition(".")[0]
    return with_signs(spec, seed(gemm)) if spec.draws_signs else spec.spelling
