"""Quantize a tensor for the two GEMMs that read it, with as few passes over the tensor as possible."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from fewbits.kernels.operators import call
from fewbits.kernels.quantizer import Mixture, Quantizer, with_signs
from fewbits.kernels.scaled_products import ScaledOperand, encode_operands
from fewbits.models.recipe import AXES, Slot

# A slot's name, the kernel's counts (arithmetic.md), and a mixture's choice for each block (None: plain quantizer).
Statistics = tuple[str, Tensor, Tensor | None]
Seed = Callable[[str], int]  # the name of a slot or GEMM to a seed
Operand = Tensor | ScaledOperand


class OperandPair:
    """The quantization of one tensor for the two GEMMs that read it, each through a slot of its own.

    A call quantizes the tensor and returns its values for the GEMM of the first slot and for the GEMM of the second.

    Arguments of the constructor:
    names: the names of the two slots.
    executed: the names of the GEMMs that read codes and scales (ScaledOperand) instead of rounded values.

    Arguments of a call:
    seed: a function that returns the seed of stochastic rounding for a slot's name, and for a GEMM's name the seed of
        the rotation signs (`signs=each`) that both operands of this GEMM share.
    statistics: a list to which the call appends the statistics of mixtures.
    watch: True also appends the statistics of plain quantizers, which take extra time.
    """

    def __init__(
        self, first: Slot, second: Slot, names: tuple[str, str], executed: Collection[str] = frozenset()
    ) -> None:
        self.first, self.second = first, second
        self.names = names
        self.executed = tuple(name.partition(".")[0] in executed for name in names)
        self.shared = first.equals(second)
        specs = [slot.spec for slot in (first, second) if slot.spec is not None]
        self.draws_signs = any(spec.draws_signs for spec in specs)
        self.needs_seed = self.draws_signs or any(spec.needs_seed for spec in specs)
        quantizers = len(specs) == 2 and not any(isinstance(spec, Mixture) for spec in specs)
        one_read = quantizers and not (self.shared or any(self.executed)) and (first.axis, second.axis) == (-1, 0)
        self._in_one_read = specs if one_read else None

    def __call__(
        self, x: Tensor, seed: Seed, statistics: list[Statistics] | None = None, *, watch: bool = False
    ) -> tuple[Operand, Operand]:
        if self._in_one_read and not watch:
            spellings = map(_resolve_spelling, self._in_one_read, self.names, (seed, seed))
            seeds = map(_seed_for, self._in_one_read, self.names, (seed, seed))
            return call(torch.ops.fewbits.quantize_both, x, *spellings, *seeds)
        if all(self.executed) and not watch:
            first, second = encode_operands(x, self._operand(0, seed), self._operand(1, seed))
            return first, second
        values = self.quantize_one(0, x, seed, statistics, watch=watch)
        if self.shared and not any(self.executed):
            return values, values
        statistics = None if self.shared else statistics
        return values, self.quantize_one(1, x, seed, statistics, watch=watch and not self.shared)

    def quantize_one(
        self, which: int, x: Tensor, seed: Seed, statistics: list[Statistics] | None = None, *, watch: bool = False
    ) -> Operand:
        """Return x quantized for only one GEMM: that of the first slot (which=0) or of the second slot (which=1).

        seed: returns the seed of a slot or GEMM by its name. If `statistics` is a list and the operand's counts were
        computed, append (name of the slot, counts, choices of a mixture or None). watch: also compute the counts of a
        plain quantizer; those of a mixture are always computed.
        """
        slot, name = (self.first, self.second)[which], self.names[0 if self.shared else which]
        spec = slot.spec
        if spec is None:
            return x
        if self.executed[which] and not watch:
            return encode_operands(x, self._operand(which, seed))[0]
        spelling, drawn, choice = _resolve_spelling(spec, name, seed), _seed_for(spec, name, seed), None
        if isinstance(spec, Mixture):
            values, choice, counts, _ = call(torch.ops.fewbits.mix, x, spelling, slot.axis, drawn)
        elif spelling == "bf16" and x.dtype == torch.bfloat16:
            return x  # a cast from bf16 to bf16 changes nothing
        elif watch:
            values, counts, _ = call(torch.ops.fewbits.quantize_stats, x, spelling, slot.axis, drawn, False)
        else:
            return call(torch.ops.fewbits.quantize, x, spelling, slot.axis, drawn)
        if statistics is not None:
            statistics.append((name, counts, choice))
        return encode_operands(x, self._operand(which, seed))[0] if self.executed[which] else values

    def _operand(self, which: int, seed: Seed) -> tuple[str, int, int]:
        """Return the string form, axis and seed with which `encode_operands` encodes a slot of an executed GEMM.

        The axis is the one that the GEMM sums over. Slots that share their values draw the same bits for each element
        along both axes.
        """
        spec, name = (self.first, self.second)[which].spec, self.names[0 if self.shared else which]
        assert isinstance(spec, Quantizer)
        return _resolve_spelling(spec, name, seed), AXES[self.names[which]], _seed_for(spec, name, seed)


def _seed_for(spec: Quantizer | Mixture, name: str, seed: Seed) -> int:
    """Return the seed of a slot's rounding, or 0 if the rounding is not random, which saves deriving a seed.

    spec: the slot's quantizer or mixture. name: the slot's name, for example `fprop.x`.
    """
    return seed(name) if spec.needs_seed else 0


def _resolve_spelling(spec: Quantizer | Mixture, slot: str, seed: Seed) -> str:
    """Return the string form of a quantizer or mixture.

    The option `signs=each` requests new signs of the Hadamard transform in each call of an OperandPair. It is replaced
    by the seed that `seed` returns for the slot's GEMM.
    """
    gemm = slot.partition(".")[0]
    return with_signs(spec, seed(gemm)) if spec.draws_signs else spec.spelling
