"""Recipes: which quantizer, mixture or sampler each operand of a linear layer's three GEMMs gets. A recipe is data.

    y  = x · wᵀ      fprop    operands x, w
    dx = dy · w      dgrad    operands dy, w
    dw = dyᵀ · x     wgrad    operands dy, x

Each of the six slots holds a spelling (fewbits.kernels.quantizer): of a quantizer, `e2m1:1x16:nvfp4`, or of a mixture,
`e4m3:128x128:gam @ error<0.045 | bf16`. Blocks lie along the dimension that the GEMM sums over. Two words more:

    high    the operand as it is, in the dtype that the model computes in
    same    in dgrad.w, wgrad.dy and wgrad.x: the very values that the other GEMM reads of this tensor, blocks and all

Tensors that two GEMMs read by equal spellings whose blocks look alike from both sides (squares, the whole tensor) are
quantized once, so forward and backward see the same codes and take one decision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fewbits.common.from_dict import from_dict, one_of
from fewbits.kernels.quantizer import Mixture, Quantizer

PARTS = ("qkv", "out", "up", "down", "in")
GEMMS = ("fprop", "dgrad", "wgrad")
PART_GROUPS = {"all": PARTS, "od": ("out", "down")}
OUTPUTS = ("compute", "bf16", "fp32")
SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
SAMPLERS = ("none", "gaussws", "diffq")
SQUARES = (1, 2, 4, 8, 16, 32, 64, 128)  # sides that a sampler's squares can have
PASSES = ("both", "forward", "backward")
SAME = "same"
HIGH = "high"


@dataclass(frozen=True)
class Fprop:
    x: str = HIGH
    w: str = HIGH


@dataclass(frozen=True)
class Dgrad:
    dy: str = HIGH
    w: str = HIGH


@dataclass(frozen=True)
class Wgrad:
    dy: str = HIGH
    x: str = HIGH
    output: str = "compute"  # what the product is rounded to before it is added to the FP32 gradient; as y and dx are


@dataclass(frozen=True)
class Keep:
    """Linear layers that get `by` in every slot: those of the first and last blocks, by part, or by name (globs)."""

    first: int = 0
    last: int = 0
    parts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    by: str = HIGH


@dataclass(frozen=True)
class Sampler:
    """Noise on the weights of some parts; learned bit widths b_t = target + b_i · (init − target) (GaussWS eq. 11)."""

    kind: str = "none"
    parts: tuple[str, ...] = ("all",)
    init: float = 6.0
    target: float = 4.0
    penalty: float = 0.0  # λ of GaussWS eq. 12
    block: int = 32
    in_evaluation: bool = False  # assumed: the paper does not say whether validation is with noise


@dataclass(frozen=True)
class Switch:
    """From a fraction of training on, the operands of the forward or backward GEMMs, or both, are taken by `to`."""

    at: float = 1.0  # never
    passes: str = "both"
    to: str = HIGH


@dataclass(frozen=True)
class Slot:
    """What is done to one operand, and along which axis of the tensor as it is stored. `spec` None: nothing."""

    spec: Quantizer | Mixture | None
    axis: int

    @property
    def looks_alike_from_both_sides(self) -> bool:
        return self.spec is None or _transposes(self.spec)

    def equals(self, other: Slot) -> bool:
        """Whether both give the same values of one tensor."""
        return self.spec == other.spec and (self.axis == other.axis or self.looks_alike_from_both_sides)


@dataclass(frozen=True)
class Operands:
    """The six slots of one layer, words resolved. x and dy are stored tokens × features, w out × in."""

    fprop_x: Slot
    fprop_w: Slot
    dgrad_dy: Slot
    dgrad_w: Slot
    wgrad_dy: Slot
    wgrad_x: Slot

    def items(self) -> Iterator[tuple[str, Slot]]:
        for f in dataclasses.fields(self):
            yield f.name.replace("_", ".", 1), getattr(self, f.name)


@dataclass(frozen=True)
class Recipe:
    name: str = "bf16"
    about: str = ""
    fprop: Fprop = field(default_factory=Fprop)
    dgrad: Dgrad = field(default_factory=Dgrad)
    wgrad: Wgrad = field(default_factory=Wgrad)
    keep: Keep = field(default_factory=Keep)
    sampler: Sampler = field(default_factory=Sampler)
    switch: Switch = field(default_factory=Switch)

    def __post_init__(self) -> None:
        one_of("wgrad.output", self.wgrad.output, OUTPUTS)
        one_of("sampler.kind", self.sampler.kind, SAMPLERS)
        one_of("switch.passes", self.switch.passes, PASSES)
        if not 0 <= self.switch.at <= 1:
            raise ValueError(f"switch.at {self.switch.at!r}: a fraction of training, from 0 to 1")
        for name in ("first", "last"):
            if getattr(self.keep, name) < 0:
                raise ValueError(f"keep.{name} {getattr(self.keep, name)!r}: a number of blocks, 0 or more")
        one_of("sampler.block", self.sampler.block, SQUARES)
        for name in ("init", "target"):
            if not math.isfinite(getattr(self.sampler, name)):
                raise ValueError(f"sampler.{name} {getattr(self.sampler, name)!r}: a bit width, a finite number")
        if not 0 <= self.sampler.penalty < math.inf:
            raise ValueError(f"sampler.penalty {self.sampler.penalty!r}: λ, 0 or more")
        parts(self.sampler.parts, "sampler.parts")
        parts(self.keep.parts, "keep.parts")
        _ = self.operands, self.kept, self.switched

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """The recipe that nested mappings (of a YAML file, say) describe; unknown keys are errors."""
        return from_dict(Recipe, data, "recipe")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @cached_property
    def operands(self) -> Operands:
        return _resolve(self.fprop, self.dgrad, self.wgrad)

    @cached_property
    def kept(self) -> Operands:
        return _everywhere(self.keep.by, "keep.by")

    @cached_property
    def switches(self) -> bool:
        """Whether anything changes on the way."""
        return self.switch.at < 1 and self.switched != self.operands

    @cached_property
    def switched(self) -> Operands:
        """The operands after the switch."""
        to = _everywhere(self.switch.to, "switch.to")
        before = self.operands
        forward, backward = self.switch.passes != "backward", self.switch.passes != "forward"
        return _checked(
            Operands(
                *(to.fprop_x, to.fprop_w) if forward else (before.fprop_x, before.fprop_w),
                *(to.dgrad_dy, to.dgrad_w, to.wgrad_dy, to.wgrad_x)
                if backward
                else (before.dgrad_dy, before.dgrad_w, before.wgrad_dy, before.wgrad_x),
            )
        )


def parts(names: tuple[str, ...], where: str = "parts") -> frozenset[str]:
    """The parts of a block that are named, groups (all; od = out and down) spelled out."""
    found: set[str] = set()
    for name in names:
        one_of(where, name, (*PARTS, *PART_GROUPS))
        found.update(PART_GROUPS.get(name, (name,)))
    return frozenset(found)


def parse_operand(text: str, where: str) -> Quantizer | Mixture | None:
    """A slot's quantizer or mixture; None for `high`."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: {text!r} is no spelling of a quantizer or mixture")
    if text == HIGH:
        return None
    try:
        return Mixture.parse(text) if "|" in text else Quantizer.parse(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; or the words high and, in dgrad.w, wgrad.dy and wgrad.x, same") from None


def _resolve(fprop: Fprop, dgrad: Dgrad, wgrad: Wgrad) -> Operands:
    along, down = -1, 0  # rows of the stored tensor, or down its columns
    x, w = Slot(parse_operand(fprop.x, "fprop.x"), along), Slot(parse_operand(fprop.w, "fprop.w"), along)
    dy = Slot(parse_operand(dgrad.dy, "dgrad.dy"), along)

    def other(text: str, where: str, first: Slot) -> Slot:
        return first if text == SAME else Slot(parse_operand(text, where), down)

    return _checked(
        Operands(
            fprop_x=x,
            fprop_w=w,
            dgrad_dy=dy,
            dgrad_w=other(dgrad.w, "dgrad.w", w),
            wgrad_dy=other(wgrad.dy, "wgrad.dy", dy),
            wgrad_x=other(wgrad.x, "wgrad.x", x),
        )
    )


def _everywhere(text: str, where: str) -> Operands:
    spec = parse_operand(text, where)
    along, down = Slot(spec, -1), Slot(spec, 0)
    return _checked(Operands(along, along, along, down, down, down))


def _checked(operands: Operands) -> Operands:
    """A rotation leaves a product unchanged only where both operands turn alike, along the dimension summed over."""
    o = operands
    for gemm, a, b in (
        ("fprop", o.fprop_x, o.fprop_w),
        ("dgrad", o.dgrad_dy, Slot(o.dgrad_w.spec, o.dgrad_w.axis - 1)),
        ("wgrad", Slot(o.wgrad_dy.spec, o.wgrad_dy.axis - 1), Slot(o.wgrad_x.spec, o.wgrad_x.axis - 1)),
    ):
        turns = [_rotation(slot.spec) for slot in (a, b)]
        if turns[0] != turns[1]:
            raise ValueError(
                f"{gemm}: {' and '.join(map(_say, (a, b)))} are rotated differently, which changes their product: "
                "give both the same rhtN and signs"
            )
        if turns[0] is not None and (a.axis, b.axis) != (-1, -1):
            raise ValueError(f"{gemm}: a rotated operand cannot be the same as the other GEMM's, which sums elsewhere")
    return operands


def _say(slot: Slot) -> str:
    return str(slot.spec) if slot.spec else HIGH


def _rotation(spec: Quantizer | Mixture | None) -> tuple[int, object] | None:
    q = spec.quantizers[0] if isinstance(spec, Mixture) else spec
    return (q.hadamard, q.signs) if q and q.hadamard else None


def _transposes(spec: Quantizer | Mixture) -> bool:
    if isinstance(spec, Mixture):
        block = spec.decision_block
        return block.rows == block.cols and all(map(_transposes, spec.quantizers))
    return spec.block.rows == spec.block.cols and spec.hadamard is None and spec.group == "tensor"
