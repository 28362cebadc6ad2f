"""Define chains: several quantizers, one after the other, in one operand slot.

    e2m1:1x32:e8m0 > e4m3:1x32:e8m0    the second quantizer quantizes the values that the first one returns
    same > e2m1:1x16:eden:rht128       quantizes the values that the tensor's other GEMM reads (fprop.x for wgrad.x)
    averis > e2m1:1x16:nvfp4           calls a registered function, which calls the later stages (hooks.py)

The blocks of every stage lie along the dimension that the slot's GEMM sums over, except that `same` stands for the
values of the other GEMM, whose blocks lie along the sum of that GEMM. If those values are rotated (Hadamard transform),
they stay rotated, and the result of the GEMM is rotated back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.hooks import HOOKS, HookStage

THEN = ">"
SAME = "same"

Stage = Quantizer | Mixture | HookStage


@dataclass(frozen=True)
class Chain:
    """Quantizers and mixtures, applied in turn, perhaps by a hook, the first stage.

    requantizes: the input is what the tensor's other GEMM reads.
    """

    stages: tuple[Stage, ...]
    requantizes: bool = False
    spelling: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.stages) + self.requantizes < 2:
            raise ValueError(f"a chain needs two stages, such as e2m1:1x32:e8m0 {THEN} e4m3:1x32:e8m0")
        if any(isinstance(stage, HookStage) for stage in self.stages[1:]) or isinstance(self.stages[-1], HookStage):
            raise ValueError(f"a hook is the first stage of a chain, followed by a quantizer: NAME {THEN} QUANTIZER")
        if sum(bool(q.hadamard) for q in self._first()) > 1:
            raise ValueError("only one stage of a chain can have a Hadamard transform (rhtN)")
        stages = [*[SAME] * self.requantizes, *map(str, self.stages)]
        object.__setattr__(self, "spelling", f" {THEN} ".join(stages))

    def __str__(self) -> str:
        return self.spelling

    @property
    def rotating(self) -> Quantizer | None:
        """The quantizer with a Hadamard transform, if there is one."""
        return next((q for q in self._first() if q.hadamard), None)

    @property
    def hook(self) -> HookStage | None:
        return self.stages[0] if isinstance(self.stages[0], HookStage) else None

    def _first(self) -> list[Quantizer]:
        """Return the first quantizer of each stage that is no hook."""
        return [first_quantizer(stage) for stage in self.stages if not isinstance(stage, HookStage)]

    @property
    def needs_seed(self) -> bool:
        return any(stage.needs_seed for stage in self.stages)

    @property
    def draws_signs(self) -> bool:
        return any(stage.draws_signs for stage in self.stages)


Spec = Quantizer | Mixture | Chain


@lru_cache(maxsize=1024)
def parse(text: str) -> Spec:
    """Parse what a slot holds: the string form of a quantizer or mixture, or of a chain of these."""
    first, *others = (part.strip() for part in text.split(THEN))
    if not others:
        return Mixture.parse(first) if "|" in first else Quantizer.parse(first)
    stages = others if first == SAME else [first, *others]
    try:
        return Chain(tuple(map(_stage, stages)), first == SAME)
    except ValueError as error:
        raise ValueError(f"{error} (in {text!r})") from None


def _stage(text: str) -> Stage:
    if "|" in text:
        return Mixture.parse(text)
    if hook := HookStage.parse(text):
        return hook
    try:
        return Quantizer.parse(text)
    except ValueError as error:
        raise ValueError(f"{error}; hooks are {', '.join(HOOKS)}") from None


def first_quantizer(spec: Spec) -> Quantizer:
    """Return the quantizer whose rotation that of `spec` is: all quantizers of a mixture have the same one."""
    if isinstance(spec, Chain):
        return spec.rotating or spec._first()[-1]
    return spec.quantizers[0] if isinstance(spec, Mixture) else spec


def quantizers_of(spec: Spec | None) -> Iterator[Quantizer]:
    """Yield the quantizers of what a slot holds."""
    if isinstance(spec, Chain):
        for stage in spec.stages:
            if not isinstance(stage, HookStage):
                yield from quantizers_of(stage)
    elif isinstance(spec, Mixture):
        yield from spec.quantizers
    elif spec is not None:
        yield spec
