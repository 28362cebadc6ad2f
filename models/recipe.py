"""Define recipes: the quantizer, mixture or sampler of each operand of a linear layer's three GEMMs, as data.

    y  = x · wᵀ      fprop    operands x, w
    dx = dy · w      dgrad    operands dy, w
    dw = dyᵀ · x     wgrad    operands dy, x

Each of the six slots holds the string form (fewbits.kernels.quantizer) of a quantizer, such as `e2m1:1x16:nvfp4`, or of
a mixture, such as `e4m3:128x128:gam @ error<0.045 | bf16`. Blocks lie along the dimension that the GEMM sums over. Two
more values are valid:

    high    the unquantized operand, in the dtype that the model computes in
    same    the quantized values that the tensor's other GEMM already reads; valid only in dgrad.w (which then reads the
            values of fprop.w), in wgrad.dy (the values of dgrad.dy) and in wgrad.x (the values of fprop.x)

A chain `A > B` quantizes by B what A returns, and `same > B` what the tensor's other GEMM reads (hooks.py). A chain may
begin with the name of a registered function.

`execute` multiplies codes and scales in FP8, MXFP8 or NVFP4 (execution.py). By default every GEMM is emulated: its
operands are rounded and then multiplied as BF16 values.

Two GEMMs read each tensor. If the slots of both have the same quantizer or mixture, and its blocks are the same along
both axes (squares, or the whole tensor), the tensor is quantized once: both GEMMs read the same values, and a mixture
makes one decision for each block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fewbits.common.from_dict import from_dict, one_of
from fewbits.kernels.quantizer import Mixture
from fewbits.models.delayed import Delayed, can_be_delayed
from fewbits.models.hooks import SAME, THEN, Chain, HookStage, Spec, first_quantizer, parse

PARTS = ("qkv", "out", "up", "down", "in")
GEMMS = ("fprop", "dgrad", "wgrad")
PART_GROUPS = {"all": PARTS, "od": ("out", "down")}
OUTPUTS = ("compute", "bf16", "fp32")
# Slot: the axis of its tensor that the slot's GEMM sums over. x and dy are stored as tokens × features, w as out × in.
AXES = {"fprop.x": -1, "fprop.w": -1, "dgrad.dy": -1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0}
SLOTS = tuple(AXES)
# Each tensor has two slots. Second slot: first slot, whose GEMM reads the tensor earlier in a training step.
FIRST_SLOT = {
    "dgrad.w": "fprop.w",
    "wgrad.dy": "dgrad.dy",
    "wgrad.x": "fprop.x",
}
SAMPLERS = ("none", "gaussws", "diffq")
SQUARES = (1, 2, 4, 8, 16, 32, 64, 128)  # valid `sampler.block`: side lengths of the squares that share a bit width
PASSES = ("both", "forward", "backward")
HIGH = "high"
EMULATE, AUTO, *_ = EXECUTIONS = ("emulate", "auto", "fp8", "mxfp8", "nvfp4")


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
    """The linear layers that get the quantizer `by` (default `high`: unquantized) in every slot instead of their own.

    A layer is selected if it is in the `first` or `last` blocks of the model (numbers of blocks), if its part is in
    `parts`, or if its module name matches one of the glob patterns in `names`.
    """

    first: int = 0
    last: int = 0
    parts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    by: str = HIGH


@dataclass(frozen=True)
class Match:
    """The linear layers to which a rule applies: those that meet every condition that is not empty.

    A layer is in the `first` or `last` blocks of the model, its part is in `parts`, and its name matches a glob pattern
    of `names`.
    """

    first: int = 0
    last: int = 0
    parts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        conditions = {name: value for name, value in vars(self).items() if value}
        texts = {name: " or ".join(value) if isinstance(value, tuple) else value for name, value in conditions.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items())


@dataclass(frozen=True)
class Rule:
    """Other quantizers for some slots of some layers. Of a recipe's rules, the first that matches a layer applies."""

    match: Match
    slots: dict[str, str]  # by slot name (`fprop.x`); slots that are missing keep the recipe's quantizer

    def __post_init__(self) -> None:
        if self.match == Match():
            raise ValueError("rules: a rule without conditions; set `match` to blocks (first, last), parts or names")
        parts(self.match.parts, "rules.match.parts")
        for slot in self.slots:
            one_of("rules.slots", slot, SLOTS)

    def __hash__(self) -> int:
        return hash((self.match, *sorted(self.slots.items())))


@dataclass(frozen=True)
class Sampler:
    """Noise on the weights of the given parts, with learned bit widths b_t (GaussWS eq. 11).

    b_t = target + b_i · (init − target). Each square of `block` × `block` weights has one trained b_i, which starts
    at 1, so `init` is the bit width at the start of training. If `penalty` is not 0, the loss has an additional term
    that grows with |b_t − target|. `kind` is one of SAMPLERS; `none`: no noise.
    """

    kind: str = "none"
    parts: tuple[str, ...] = ("all",)
    init: float = 6.0
    target: float = 4.0
    penalty: float = 0.0  # λ of GaussWS eq. 12: the factor of the bit widths' penalty in the loss
    block: int = 32
    in_evaluation: bool = False  # whether evaluations use noise; False is assumed, the paper does not say it


@dataclass(frozen=True)
class Switch:
    """A change during training: after the fraction `at` of training, the slots of some passes get the quantizer `to`.

    passes: one of PASSES; `forward` changes the slots of fprop, `backward` those of dgrad and wgrad, `both` all slots.
    """

    at: float = 1.0  # a fraction of training; 1.0: never
    passes: str = "both"
    to: str = HIGH


@dataclass(frozen=True)
class Slot:
    """What quantizes an operand (None: nothing), and the axis of the tensor along which blocks lie.

    delayed: the tensor's scale comes from earlier steps (delayed.py).
    """

    spec: Spec | None
    axis: int
    delayed: bool = False

    def equals(self, other: Slot) -> bool:
        """Tell whether both slots round a tensor to the same values."""
        same_axis = self.axis == other.axis or self.spec is None or _transposes(self.spec)
        return self.spec == other.spec and self.delayed == other.delayed and same_axis


Operands = Mapping[str, Slot]  # the six slots of a layer, by slot name (`fprop.x` …)


@dataclass(frozen=True)
class Recipe:
    """A recipe: name and one-line description (`about`), operands of the three GEMMs, and exceptions from these.

    source: the paper or repository that defines it. differs: how this recipe differs from the source.
    """

    name: str = "bf16"
    about: str = ""
    source: str = field(default="", metadata={"neutral": ""})
    differs: str = field(default="", metadata={"neutral": ""})
    fprop: Fprop = field(default_factory=Fprop)
    dgrad: Dgrad = field(default_factory=Dgrad)
    wgrad: Wgrad = field(default_factory=Wgrad)
    keep: Keep = field(default_factory=Keep)  # applies before the rules
    rules: tuple[Rule, ...] = field(default=(), metadata={"neutral": ()})
    sampler: Sampler = field(default_factory=Sampler)
    switch: Switch = field(default_factory=Switch)
    delayed: Delayed = field(default_factory=Delayed, metadata={"neutral": Delayed()})
    execute: str = EMULATE  # whether GEMMs are computed from rounded values, or from codes and scales

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
        for slot in self.delayed.slots:
            one_of("delayed.slots", slot, SLOTS)
            if not self.operands[slot].delayed:
                raise ValueError(
                    f"delayed.slots: {slot} is {_spell(self.operands[slot])}, which has no scale for the whole tensor: "
                    "valid are quantizers such as e4m3:tensor:amax, and e2m1:1x16:nvfp4, ue5m3 or eden"
                )
        _ = self.operands, self.kept, self.switched
        for rule in self.rules:
            self.operands_by(rule)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """Build a recipe from nested mappings, such as those of a YAML file; unknown keys are errors."""
        return from_dict(Recipe, data, "recipe")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @cached_property
    def operands(self) -> Operands:
        """The six slots of a layer that `keep` does not select, before `switch` changes them."""
        return self.operands_by(None)

    def operands_by(self, rule: Rule | None) -> Operands:
        """Return the six slots of a layer to which a rule (None: no rule) applies, before `switch` changes them.

        A slot with the value `same` is replaced by the slot of the tensor's other GEMM.
        """
        operands: dict[str, Slot] = {}
        for slot, axis in AXES.items():
            gemm, tensor = slot.split(".")
            own = getattr(getattr(self, gemm), tensor)
            text = own if rule is None else rule.slots.get(slot, own)
            same = text == SAME and slot in FIRST_SLOT
            spec = None if same else parse_operand(text, slot)
            delayed = slot in self.delayed.slots and can_be_delayed(spec)
            operands[slot] = operands[FIRST_SLOT[slot]] if same else Slot(spec, axis, delayed)
        return _check_rotations(operands)

    @cached_property
    def specs(self) -> tuple[Spec | None, ...]:
        """What the slots of all layers have that `keep` does not select, each once; None stands for `high`."""
        layers = (self.operands, *map(self.operands_by, self.rules))
        return tuple(dict.fromkeys(slot.spec for operands in layers for slot in operands.values()))

    @cached_property
    def kept(self) -> Operands:
        """The six slots of a layer that `keep` selects: `keep.by` in each."""
        return _in_every_slot(self.keep.by, "keep.by")

    @cached_property
    def switched(self) -> Operands:
        """The six slots after the switch (`switch.at`) of a layer that `keep` does not select."""
        return self.switched_from(self.operands)

    def switched_from(self, operands: Operands) -> Operands:
        """Return the six slots after the switch of a layer that has these slots before it."""
        to = _in_every_slot(self.switch.to, "switch.to")
        unchanged = {"both": (), "forward": ("dgrad", "wgrad"), "backward": ("fprop",)}[self.switch.passes]
        before = {name: slot for name, slot in operands.items() if name.partition(".")[0] in unchanged}
        return _check_rotations(to | before)

    @property
    def sampled_parts(self) -> frozenset[str]:
        """The parts of layers (such as `qkv`) whose weights get noise; empty without a sampler."""
        return frozenset() if self.sampler.kind == "none" else parts(self.sampler.parts)

    @property
    def without_texts(self) -> Recipe:
        """The recipe without its description."""
        return dataclasses.replace(self, about="", source="", differs="")

    @property
    def label(self) -> str:
        """The name under which runs are grouped: the recipe's name, plus `-executed` or `-auto` by `execute`."""
        return self.name + {EMULATE: "", AUTO: "-auto"}.get(self.execute, "-executed")

    @property
    def switches(self) -> bool:
        """True if `switch` changes the operands before the end of training."""
        return self.switch.at < 1 and self.switched != self.operands


def parts(names: tuple[str, ...], key: str = "parts") -> frozenset[str]:
    """Return the names as a set of parts of layers, such as `qkv`; raise ValueError for an unknown name.

    The name `all` is replaced by all parts, and `od` by `out` and `down`. key: the setting that the error names.
    """
    expanded: set[str] = set()
    for name in names:
        one_of(key, name, (*PARTS, *PART_GROUPS))
        expanded.update(PART_GROUPS.get(name, (name,)))
    return frozenset(expanded)


def parse_operand(text: str, key: str) -> Spec | None:
    """Parse a slot's quantizer, mixture or chain; return None for `high`. key: the setting that error messages name."""
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected a quantizer or mixture as a string, not {text!r}")
    if text == HIGH:
        return None
    try:
        spec = parse(text)
    except ValueError as error:
        raise ValueError(
            f"{key}: {error}; `high` is valid too, and in dgrad.w, wgrad.dy and wgrad.x also `same`"
        ) from None
    if isinstance(spec, Chain) and spec.requantizes and key not in FIRST_SLOT:
        raise ValueError(f"{key}: {text!r}: `{SAME} {THEN}` is valid only in {', '.join(FIRST_SLOT)}")
    return spec


def _in_every_slot(text: str, key: str) -> dict[str, Slot]:
    """Return a layer's six slots, each with the quantizer, mixture or chain `text`. key: what errors name."""
    spec = parse_operand(text, key)
    return _check_rotations({slot: Slot(spec, axis) for slot, axis in AXES.items()})


def _check_rotations(operands: dict[str, Slot]) -> dict[str, Slot]:
    """Return the operands unchanged; raise ValueError if a GEMM's rotations (Hadamard transforms) would not cancel."""
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
                f"{gemm}: a rotated operand cannot be `same`, because its Hadamard transform (rhtN) is not along the "
                f"dimension that {gemm} sums over: give the slot its own quantizer"
            )
    return operands


def _spell(slot: Slot) -> str:
    return str(slot.spec) if slot.spec else HIGH


def _rotation(spec: Spec | None) -> tuple[int, object] | None:
    """Return (size, signs) of the Hadamard transform of a slot's quantizers, or None if there is no transform."""
    q = None if spec is None else first_quantizer(spec)
    return (q.hadamard, q.signs) if q and q.hadamard else None


def _transposes(spec: Spec) -> bool:
    """Tell whether quantization gives the same values for both axes along which the blocks of `spec` can lie.

    This holds if each block, and each decision block of a mixture, is a square or the whole tensor, and if there is
    neither a Hadamard transform nor a scale for each row of blocks (`group=row`).
    """
    if isinstance(spec, Chain):
        stages = [stage for stage in spec.stages if not isinstance(stage, HookStage)]
        return not (spec.requantizes or spec.hook) and all(map(_transposes, stages))
    if isinstance(spec, Mixture):
        block = spec.decision_block
        return block.rows == block.cols and all(map(_transposes, spec.quantizers))
    return spec.block.rows == spec.block.cols and spec.hadamard is None and spec.group == "tensor"
