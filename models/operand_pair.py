"""Quantize a tensor for the two GEMMs that read it, with as few passes over the tensor as possible."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fewbits.kernels.operators import call
from fewbits.kernels.quantizer import Mixture, Quantizer, with_signs
from fewbits.kernels.scaled_products import ScaledOperand, encode_operands
from fewbits.models.delayed import DelayedScales, quantize_for
from fewbits.models.hooks import THEN, Chain, HookStage, Rest, Stage
from fewbits.models.recipe import AXES, SLOTS, Slot

# A slot's name, the kernel's counts (arithmetic.md), and a mixture's choice for each block (None: plain quantizer).
Statistics = tuple[str, Tensor, Tensor | None]
Seed = Callable[[str], int]  # the name of a slot or GEMM to a seed
Operand = Tensor | ScaledOperand
_MOST_STAGES = 16  # more than a chain has, so that each draw of a hook has names of its own


class OperandPair:
    """The quantization of one tensor for the two GEMMs that read it, each through a slot of its own.

    A call quantizes the tensor and returns its values for the GEMM of the first slot and for the GEMM of the second.

    Arguments of the constructor:
    executed: the names of the GEMMs that read codes and scales (ScaledOperand) instead of rounded values.
    scales: the state of the slots with delayed scales, and the number there of the layer's first slot; None: their
        scales are current ones.

    Arguments of a call:
    seed: a function that returns the seed of stochastic rounding for a slot's name, and for a GEMM's name the seed of
        the rotation signs (`signs=each`) that both operands of this GEMM share. The name of a stage of a chain is that
        of the slot with a `>` for each later stage.
    statistics: a list to which the call appends the statistics of mixtures.
    watch: True also appends the statistics of plain quantizers, which take extra time.
    """

    def __init__(
        self,
        first: Slot,
        second: Slot,
        names: tuple[str, str],
        executed: Collection[str] = frozenset(),
        scales: tuple[DelayedScales, int] | None = None,
    ) -> None:
        self.first, self.second = first, second
        self.names, self.scales = names, scales
        self.executed = tuple(name.partition(".")[0] in executed for name in names)
        self.shared = first.equals(second)
        self.requantizes = isinstance(second.spec, Chain) and second.spec.requantizes
        hook = first.spec.hook if isinstance(first.spec, Chain) else None
        self.hook = hook if hook is not None and hook.hook.backward is not None else None  # has a backward rule
        specs = [slot.spec for slot in (first, second) if slot.spec is not None]
        self.draws_signs = any(spec.draws_signs for spec in specs)
        self.needs_seed = self.draws_signs or any(spec.needs_seed for spec in specs)
        quantizers = [slot.spec for slot in (first, second) if isinstance(slot.spec, Quantizer) and not slot.delayed]
        apart = not (self.shared or any(self.executed)) and (first.axis, second.axis) == (-1, 0)
        self._in_one_read = quantizers if apart and len(quantizers) == 2 else None

    def __call__(
        self, x: Tensor, seed: Seed, statistics: list[Statistics] | None = None, *, watch: bool = False
    ) -> tuple[Operand, Operand]:
        if self._in_one_read and not watch:
            spellings = map(resolve_spelling, self._in_one_read, self.names, (seed, seed))
            seeds = map(_seed_for, self._in_one_read, self.names, (seed, seed))
            return call(torch.ops.fewbits.quantize_both, x, *spellings, *seeds)
        if all(self.executed) and not watch:
            row, column = encode_operands(x, self._operand(0, seed), self._operand(1, seed))
            return row, column
        values = self.quantize_one(0, x, seed, statistics, watch=watch)
        if self.shared and not any(self.executed):
            return values, values
        statistics = None if self.shared else statistics
        first = values if isinstance(values, Tensor) else None
        return values, self.quantize_one(1, x, seed, statistics, watch=watch and not self.shared, first=first)

    def quantize_one(
        self,
        which: int,
        x: Tensor,
        seed: Seed,
        statistics: list[Statistics] | None = None,
        *,
        watch: bool = False,
        first: Tensor | None = None,
    ) -> Operand:
        """Return x quantized for only one GEMM: that of the first slot (which=0) or of the second slot (which=1).

        In a chain, the statistics are those of the last stage. first: x quantized for the first slot, if it is known.
        """
        slot, name = (self.first, self.second)[which], self.names[0 if self.shared else which]
        spec = slot.spec
        if spec is None:
            return x
        if self.executed[which] and not watch:
            return encode_operands(x, self._operand(which, seed))[0]
        values = x
        if which and self.requantizes:
            values = self._rounded(0, x, self.names[0], seed) if first is None else first
        values = self._rounded(which, values, name, seed, statistics, watch)
        return encode_operands(x, self._operand(which, seed))[0] if self.executed[which] else values

    def _rounded(
        self,
        which: int,
        x: Tensor,
        name: str,
        seed: Seed,
        statistics: list[Statistics] | None = None,
        watch: bool = False,
    ) -> Tensor:
        """Return x quantized by the quantizer, mixture or all stages of a slot."""
        slot = (self.first, self.second)[which]
        if slot.spec is None:
            return x
        if slot.delayed:
            return self._with_delayed_scale(slot, x, name, seed, statistics, watch)
        if not isinstance(slot.spec, Chain):
            return _round(slot.spec, x, slot.axis, name, seed, statistics, watch)
        if slot.spec.hook is not None:
            return slot.spec.hook.values(x, _rest(slot.spec, slot.axis, name, seed, statistics, watch))
        return _round_all(slot.spec.stages, x, slot.axis, name, seed, statistics, watch)

    def gradient(self, gradient: Tensor, x: Tensor, seed: Seed) -> Tensor:
        """Return the gradient of x by the backward rule of the first slot's hook, if it has one.

        gradient: that by the straight-through rule.
        """
        hook, spec = self.hook, self.first.spec
        if hook is None or not isinstance(spec, Chain):
            return gradient
        return hook.gradient(gradient, x, _rest(spec, self.first.axis, self.names[0], seed, None, False))

    def _with_delayed_scale(
        self, slot: Slot, x: Tensor, name: str, seed: Seed, statistics: list[Statistics] | None, watch: bool
    ) -> Tensor:
        spec = Quantizer.parse(resolve_spelling(slot.spec, name, seed)) if isinstance(slot.spec, Quantizer) else None
        assert spec is not None
        scales, first = self.scales or (None, 0)
        number = first + SLOTS.index(name)
        values, counts = quantize_for(x, spec, slot.axis, _seed_for(spec, name, seed), scales, number, watch)
        if statistics is not None and counts is not None:
            statistics.append((name, counts, None))
        return values

    def _operand(self, which: int, seed: Seed) -> tuple[str, int, int]:
        """Return the string form, axis and seed with which `encode_operands` encodes a slot of an executed GEMM.

        The axis is the one that the GEMM sums over. Slots that share their values draw the same bits for each element
        along both axes.
        """
        spec, name = (self.first, self.second)[which].spec, self.names[0 if self.shared else which]
        assert isinstance(spec, Quantizer)
        return resolve_spelling(spec, name, seed), AXES[self.names[which]], _seed_for(spec, name, seed)


def _round_all(
    stages: Sequence[Stage],
    x: Tensor,
    axis: int,
    name: str,
    seed: Seed,
    statistics: list[Statistics] | None,
    watch: bool,
    draw: int = 0,
) -> Tensor:
    """Return x quantized by all stages of a chain that are no hook; statistics are those of the last stage."""
    for later, stage in zip(range(len(stages) - 1, -1, -1), stages, strict=True):
        assert not isinstance(stage, HookStage)
        own = name + THEN * (later + _MOST_STAGES * draw)
        x = _round(stage, x, axis, own, seed, None if later or draw else statistics, watch and not (later or draw))
    return x


def _rest(spec: Chain, axis: int, name: str, seed: Seed, statistics: list[Statistics] | None, watch: bool) -> Rest:
    """Return what the hook of a chain gets: its later stages."""
    last, turning, turn = spec.stages[-1], spec.rotating, ""
    if turning is not None:
        resolved = Quantizer.parse(resolve_spelling(turning, name, seed))
        turn = Quantizer("fp32", hadamard=resolved.hadamard, signs=resolved.signs).spelling

    def apply(x: Tensor, axis: int, draw: int) -> Tensor:
        return _round_all(spec.stages[1:], x, axis, name, seed, statistics, watch, draw)

    return Rest(axis, last if isinstance(last, Quantizer) else None, turn, apply)


def _round(
    spec: Quantizer | Mixture,
    x: Tensor,
    axis: int,
    name: str,
    seed: Seed,
    statistics: list[Statistics] | None,
    watch: bool,
) -> Tensor:
    """Return x quantized by a quantizer or mixture. name: that of the slot, or of a stage of its chain."""
    spelling, drawn, choice = resolve_spelling(spec, name, seed), _seed_for(spec, name, seed), None
    if isinstance(spec, Mixture):
        values, choice, counts, _ = call(torch.ops.fewbits.mix, x, spelling, axis, drawn)
    elif spelling == "bf16" and x.dtype == torch.bfloat16:
        return x  # a cast from bf16 to bf16 changes nothing
    elif watch:
        values, counts, _ = call(torch.ops.fewbits.quantize_stats, x, spelling, axis, drawn, False)
    else:
        return call(torch.ops.fewbits.quantize, x, spelling, axis, drawn)
    if statistics is not None:
        statistics.append((name, counts, choice))
    return values


def _seed_for(spec: Quantizer | Mixture, name: str, seed: Seed) -> int:
    """Return the seed of a slot's rounding, or 0 if the rounding is not random, which saves deriving a seed."""
    return seed(name) if spec.needs_seed else 0


def resolve_spelling(spec: Quantizer | Mixture, slot: str, seed: Seed) -> str:
    """Return the string form of a quantizer or mixture.

    The option `signs=each` requests new signs of the Hadamard transform in each call of an OperandPair. It is replaced
    by the seed that `seed` returns for the slot's GEMM.
    """
    gemm = slot.partition(".")[0]
    return with_signs(spec, seed(gemm)) if spec.draws_signs else spec.spelling
