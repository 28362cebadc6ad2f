"""Keep tensor scales across training steps: delayed scaling, as in TransformerEngine, and scales that are held.

A slot with a delayed scale is quantized as if its tensor's largest magnitude were that of earlier steps. The amax of a
step is the largest over its micro-batches and ranks. Before a step, the amax of the step before it enters the history,
and every `hold` steps

    amax = max(history), or its most recent entry      (with 0 or a non-finite number, the earlier scale stays)
    scale = largest value of the format / amax / 2^margin

Values beyond the amax saturate. Until an amax is known, the scale is that of the current tensor. The first slot of a
tensor has the state if both slots share their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fewbits.common.from_dict import one_of
from fewbits.kernels.backends.reference import count
from fewbits.kernels.operators import call
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import codes_of, divide, largest, round_to_grid
from fewbits.kernels.reference.noise import uniform
from fewbits.kernels.reference.rounding import correction, round_with, without_lost_blocks
from fewbits.kernels.reference.scales import FLT_MAX, Scales, ideal, restore, stored_values

USES = ("max", "recent")

LONGEST = 65_536  # steps; a history has a number for each of them, and for each slot of each layer


@dataclass(frozen=True)
class Delayed:
    """The slots whose tensor scale comes from earlier steps, and how; no slots: all scales are current.

    history: the number of steps whose amax is kept. use: one of USES. margin: a power of two by which scales are
    smaller than the amax allows. hold: the number of steps after which scales change.
    """

    slots: tuple[str, ...] = field(default=(), metadata={"neutral": ()})
    history: int = field(default=1, metadata={"neutral": 1})
    use: str = field(default="max", metadata={"neutral": "max"})
    margin: float = field(default=0.0, metadata={"neutral": 0.0})
    hold: int = field(default=1, metadata={"neutral": 1})

    def __post_init__(self) -> None:
        one_of("delayed.use", self.use, USES)
        for name, value in (("history", self.history), ("hold", self.hold)):
            if not 1 <= value <= LONGEST:
                raise ValueError(f"delayed.{name} {value}: expected a number of steps from 1 to {LONGEST:,}")
        if not -64 <= self.margin <= 64:
            raise ValueError(f"delayed.margin {self.margin}: expected a power of two, -64 to 64")


def can_be_delayed(q: object) -> bool:
    """Tell whether a quantizer has one FP32 scale for the tensor, alone or above the scales of blocks.

    Options other than rounding, rotation and overflow are not implemented here.
    """
    if not isinstance(q, Quantizer):
        return False
    if q != Quantizer(q.format, q.block, q.scaling, q.rounding, q.hadamard, q.signs, q.overflow):
        return False
    alone = q.traits.kind == "float" and str(q.block) == "tensor"
    return alone or (q.traits.kind == "two-level" and not q.traits.compares)


@dataclass
class DelayedScales:
    """The amax history of all slots of a model's layers; a row of `history` is a step, the most recent first."""

    settings: Delayed
    slots: int
    step: int | None = None  # the step of `seen`; None: no step has begun
    recording: bool = True  # False in evaluations, whose activations are not part of the history
    history: Tensor = field(init=False)
    seen: Tensor = field(init=False)  # the amaxes of this step so far
    held: Tensor = field(init=False)  # the amax, times 2^margin, for which scales are computed; 0: not yet known

    def __post_init__(self) -> None:
        self.history = torch.zeros(self.settings.history, self.slots)
        self.seen, self.held = torch.zeros(self.slots), torch.zeros(self.slots)

    def amax(self, slot: int, source: Tensor) -> Tensor:
        """Return the amax for which a slot's scale is computed, and record that of its tensor. slot: its number."""
        if self.seen.device != source.device:
            self.history, self.seen, self.held = (t.to(source.device) for t in (self.history, self.seen, self.held))
        amax = source.abs().amax() if source.numel() else source.new_zeros(())
        if self.recording:
            self.seen[slot] = torch.maximum(self.seen[slot], amax)
        return torch.where(self.held[slot] > 0, self.held[slot], amax * 2.0**self.settings.margin)

    def advance(self, step: int) -> None:
        """Begin a step: the amaxes that were seen enter the history. All ranks must call this."""
        if step == self.step:
            return
        began, self.step = self.step is not None, step
        if not began:
            return
        self._reduce()
        self.history = torch.cat((self.seen[None], self.history[:-1]))
        self.seen = torch.zeros_like(self.seen)
        amax = self.history.amax(0) if self.settings.use == "max" else self.history[0]
        changes = amax.isfinite() & (amax > 0)
        if step % self.settings.hold:
            changes &= self.held == 0
        self.held = torch.where(changes, amax * 2.0**self.settings.margin, self.held)

    def _reduce(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.seen, dist.ReduceOp.MAX)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs; all ranks must call this."""
        self._reduce()
        return {"history": self.history, "seen": self.seen, "held": self.held, "step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state; raise ValueError if it is of another model or history length."""
        if state["history"].shape != self.history.shape:
            shapes = f"{tuple(state['history'].shape)} and {tuple(self.history.shape)}"
            raise ValueError(f"the histories of delayed scales differ in steps or slots: {shapes}")
        self.history, self.seen, self.held = (state[name].clone() for name in ("history", "seen", "held"))
        self.step = state["step"]


def quantize_for(
    x: Tensor, q: Quantizer, axis: int, seed: int, scales: DelayedScales | None, slot: int, watch: bool
) -> tuple[Tensor, Tensor | None]:
    """Return x quantized with a delayed scale, and the counts of its statistics if `watch` is set.

    scales: None stands for current scales. slot: the slot's number in `scales`. Other arguments: as for the operators.
    """
    source = x
    if q.hadamard:
        turn = Quantizer("fp32", hadamard=q.hadamard, signs=q.signs).spelling
        source = call(torch.ops.fewbits.quantize, x, turn, axis, 0)
    source = source.float()
    amax = source.abs().amax() if scales is None else scales.amax(slot, source)
    if q.traits.kind == "two-level":
        return _two_level(source, q, axis, seed, amax.view(1, 1), x.dtype, watch)
    factor, cast = ideal(amax, q.format), Quantizer(q.format, rounding=q.rounding, overflow=q.overflow).spelling
    counts = None
    if watch:
        values, counts, _ = call(torch.ops.fewbits.quantize_stats, source * factor, cast, axis, seed, False)
    else:
        values = call(torch.ops.fewbits.quantize, source * factor, cast, axis, seed)
    limit = torch.finfo(x.dtype).max
    y = values / factor
    return torch.where(values.isinf(), y, y.clamp(-limit, limit)).to(x.dtype), counts


def _two_level(
    source: Tensor, q: Quantizer, axis: int, seed: int, tensor_amax: Tensor, dtype: torch.dtype, watch: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what the reference (kernels/reference) does for this amax of the tensor, and counts if `watch` is set."""
    stored = q.traits.stored
    assert stored is not None
    amax = largest(source, q.block.resolve(source.shape, axis))
    top = torch.full_like(tensor_amax, q.traits.top or q.format.max)
    g = torch.where(tensor_amax == 0, 1, (top * q.traits.target / tensor_amax).clamp(max=FLT_MAX))
    s8 = (amax.nan_to_num(0, 0) * (g * divide(1, top))).clamp(max=stored.max)
    s8 = torch.where(amax.isfinite(), round_to_grid(s8, stored), math.nan)
    scales = Scales(codes_of(s8, stored), divide(1, g).flatten())
    draws = uniform(source.numel(), seed, source.device).view(source.shape) if q.rounding == "stochastic" else None
    rounded = round_with(scales, source, q, axis, draws)
    if q.traits.corrects:
        corrected = (stored_values(scales, q) * correction(rounded, q, axis)).clamp(max=stored.max)
        drawn = round_to_grid(corrected, stored, uniform(amax.numel(), seed, amax.device).view(amax.shape))
        scales = Scales(codes_of(torch.where(s8.isnan(), s8, drawn), stored), scales.groups)
        rounded = replace(rounded, scales=scales, values=without_lost_blocks(rounded.values, scales, q, axis))
    y = restore(rounded.values, rounded.scales, q, axis, dtype)
    return y, count(rounded, y, (max(source.shape[0], 1), max(source.shape[1], 1))) if watch else None
