"""Define recipes: the quantizer, mixture or sampler of each operand of a linear layer's three GEMMs, as data.

    y  = x · wᵀ      fprop    operands x, w
    dx = dy · w      dgrad    operands dy, w
    dw = dyᵀ · x     wgrad    operands dy, x

Each of the six slots holds the string form (fewbits.kernels.quantizer) of a quantizer, such as `e2m1:1x16:nvfp4`, or of
a mixture, such as `e4m3:128x128:gam @ error<0.045 | bf16`. Blocks lie along the dimension that the GEMM sums over. Two
more values are valid:

    high    the unquantized operand, in the dtype that the model computes in
    same    only in dgrad.w, wgrad.dy and wgrad.x: the values of this tensor that another GEMM reads (those of fprop.w,
            dgrad.dy and fprop.x)

`execute: fp8` computes the GEMMs of E4M3 operands from their codes (execution.py); by default all are emulated.

If both GEMMs that read a tensor have equal quantizers or mixtures, and the blocks are the same along both axes
(squares, the whole tensor), the tensor is quantized once: both GEMMs read the same codes, and a mixture decides once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fewbits.common.from_dict import from_dict, one_of
from fewbits.kernels.quantizer import Mixture, Quantizer

PARTS = ("qkv", "out", "up", "down", "in")
GEMMS = ("fprop", "dgrad", "wgrad")
PART_GROUPS = {"all": PARTS, "od": ("out", "down")}
OUTPUTS = ("compute", "bf16", "fp32")
# The axis of each stored tensor (x and dy tokens × features, w out × in) that the slot's GEMM sums over.
AXES = {"fprop.x": -1, "fprop.w": -1, "dgrad.dy": -1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0}
SLOTS = tuple(AXES)
# For the second slot of each tensor, the slot whose GEMM reads the same tensor first.
FIRST_SLOT = {
    "dgrad.w": "fprop.w",
    "wgrad.dy": "dgrad.dy",
    "wgrad.x": "fprop.x",
}
SAMPLERS = ("none", "gaussws", "diffq")
SQUARES = (1, 2, 4, 8, 16, 32, 64, 128)  # valid side lengths of a sampler's squares
PASSES = ("both", "forward", "backward")
SAME = "same"
HIGH = "high"
EMULATE, FP8 = EXECUTIONS = ("emulate", "fp8")


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
    output: str = "compute"  # the dtype of dw before it is added to the FP32 gradient; compute: the dtype of y and dx


@dataclass(frozen=True)
class Keep:
    """The linear layers that get `by` in every slot, selected by first and last blocks, by part, or by name (globs)."""

    first: int = 0
    last: int = 0
    parts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    by: str = HIGH


@dataclass(frozen=True)
class Sampler:
    """Noise on the weights of some parts, with learned widths b_t = target + b_i · (init − target) (GaussWS eq. 11)."""

    kind: str = "none"
    parts: tuple[str, ...] = ("all",)
    init: float = 6.0
    target: float = 4.0
    penalty: float = 0.0  # λ of GaussWS eq. 12
    block: int = 32
    in_evaluation: bool = False  # assumed: the paper does not say whether validation uses noise


@dataclass(frozen=True)
class Switch:
    """A change during training: after the fraction `at`, the slots of the given passes get the quantizer `to`."""

    at: float = 1.0  # 1.0: never
    passes: str = "both"
    to: str = HIGH


@dataclass(frozen=True)
class Slot:
    """The quantizer or mixture of an operand (None: unquantized), and the axis of its tensor along which blocks lie."""

    spec: Quantizer | Mixture | None
    axis: int

    def equals(self, other: Slot) -> bool:
        """Tell whether both slots give the same values for the same tensor."""
        same_axis = self.axis == other.axis or self.spec is None or _transposes(self.spec)
        return self.spec == other.spec and same_axis


Operands = Mapping[str, Slot]  # the six slots of a layer by name


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
    execute: str = EMULATE  # how GEMMs of quantized operands are computed: from rounded values, or from FP8 codes

    def __post_init__(self) -> None:
        one_of("execute", self.execute, EXECUTIONS)
        one_of("wgrad.output", self.wgrad.output, OUTPUTS)
        one_of("sampler.kind", self.sampler.kind, SAMPLERS)
        one_of("switch.passes", self.switch.passes, PASSES)
        one_of("sampler.block", self.sampler.block, SQUARES)
        for key, value, valid, expected in (
            ("switch.at", self.switch.at, 0 <= self.switch.at <= 1, "a fraction of training, from 0 to 1"),
            ("keep.first", self.keep.first, self.keep.first >= 0, "a number of blocks, 0 or more"),
            ("keep.last", self.keep.last, self.keep.last >= 0, "a number of blocks, 0 or more"),
            ("sampler.init", self.sampler.init, math.isfinite(self.sampler.init), "a bit width, a finite number"),
            ("sampler.target", self.sampler.target, math.isfinite(self.sampler.target), "a bit width, a finite number"),
            ("sampler.penalty", self.sampler.penalty, 0 <= self.sampler.penalty < math.inf, "λ, a finite number ≥ 0"),
        ):
            if not valid:
                raise ValueError(f"{key} {value!r}: expected {expected}")
        parts(self.sampler.parts, "sampler.parts")
        parts(self.keep.parts, "keep.parts")
        _ = self.operands, self.kept, self.switched

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """Build a recipe from nested mappings, such as those of a YAML file; unknown keys are errors."""
        return from_dict(Recipe, data, "recipe")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @cached_property
    def operands(self) -> Operands:
        operands: dict[str, Slot] = {}
        for slot, axis in AXES.items():
            gemm, tensor = slot.split(".")
            text = getattr(getattr(self, gemm), tensor)
            same = text == SAME and slot in FIRST_SLOT
            operands[slot] = operands[FIRST_SLOT[slot]] if same else Slot(parse_operand(text, slot), axis)
        return _check_rotations(operands)

    @cached_property
    def kept(self) -> Operands:
        return _in_every_slot(self.keep.by, "keep.by")

    @cached_property
    def switched(self) -> Operands:
        """The operands after the recipe's switch (`switch.at`)."""
        to = _in_every_slot(self.switch.to, "switch.to")
        unchanged = {"both": (), "forward": ("dgrad", "wgrad"), "backward": ("fprop",)}[self.switch.passes]
        before = {name: slot for name, slot in self.operands.items() if name.partition(".")[0] in unchanged}
        return _check_rotations(to | before)

    @property
    def sampled_parts(self) -> frozenset[str]:
        return frozenset() if self.sampler.kind == "none" else parts(self.sampler.parts)

    @property
    def label(self) -> str:
        """The name under which runs are grouped, which keeps executed runs apart from emulated ones."""
        return self.name if self.execute == EMULATE else f"{self.name}-executed"

    @property
    def switches(self) -> bool:
        """True if the operands change during training."""
        return self.switch.at < 1 and self.switched != self.operands


def parts(names: tuple[str, ...], key: str = "parts") -> frozenset[str]:
    """Return the parts with these names; the names `all` and `od` (out and down) stand for several parts."""
    expanded: set[str] = set()
    for name in names:
        one_of(key, name, (*PARTS, *PART_GROUPS))
        expanded.update(PART_GROUPS.get(name, (name,)))
    return frozenset(expanded)


def parse_operand(text: str, key: str) -> Quantizer | Mixture | None:
    """Parse a slot's quantizer or mixture; return None for `high`."""
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected a quantizer or mixture as a string, not {text!r}")
    if text == HIGH:
        return None
    try:
        return Mixture.parse(text) if "|" in text else Quantizer.parse(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; high is valid too, and same in dgrad.w, wgrad.dy and wgrad.x") from None


def _in_every_slot(text: str, key: str) -> dict[str, Slot]:
    spec = parse_operand(text, key)
    return _check_rotations({slot: Slot(spec, axis) for slot, axis in AXES.items()})


def _check_rotations(operands: dict[str, Slot]) -> dict[str, Slot]:
    """Return the operands; raise ValueError if the two operands of a GEMM are rotated differently."""
    for gemm in GEMMS:
        slots = {name: slot for name, slot in operands.items() if name.startswith(gemm)}
        first, second = (_rotation(slot.spec) for slot in slots.values())
        if first != second:
            raise ValueError(
                f"{gemm}: {' and '.join(map(_spell, slots.values()))} have different rotations, which changes "
                "their product: use the same rhtN and signs for both"
            )
        if first is not None and any(slot.axis != AXES[name] for name, slot in slots.items()):
            raise ValueError(
                f"{gemm}: a rotated operand cannot be `same`, because the other GEMM sums over another dimension"
            )
    return operands


def _spell(slot: Slot) -> str:
    return str(slot.spec) if slot.spec else HIGH


def _rotation(spec: Quantizer | Mixture | None) -> tuple[int, object] | None:
    q = spec.quantizers[0] if isinstance(spec, Mixture) else spec
    return (q.hadamard, q.signs) if q and q.hadamard else None


def _transposes(spec: Quantizer | Mixture) -> bool:
    if isinstance(spec, Mixture):
        block = spec.decision_block
        return block.rows == block.cols and all(map(_transposes, spec.quantizers))
    return spec.block.rows == spec.block.cols and spec.hadamard is None and spec.group == "tensor"
