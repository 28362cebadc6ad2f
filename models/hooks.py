"""Define chains of quantizers, and register functions that they call by name.

Such a function is a hook, as in `averis > e2m1:1x16:nvfp4` or `dge:k=5 > e2m1:channel:amax`. A hook is the first stage
of a slot's chain. Its function gets the operand and the later stages (`Rest`), and returns the values that the GEMM
reads, in the basis to which the later stages rotate. A hook in fprop.x or fprop.w may also have a backward rule: it
gets the gradient of the operand by the straight-through rule, and returns the gradient. The settings in a name are the
function's keyword-only parameters; their defaults are numbers.

Hooks of your own are functions in the file `conf/hooks.py` of the working directory:

    from fewbits.models.hooks import Rest, hook

    @hook("halved")
    def halved(x, rest, *, by=2.0):
        return rest.quantize(x / by) * by

The id of a trial that uses one has a digest of this file and of the modules beside it that it imports; jobs on a
cluster get them.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fewbits.kernels.operators import call
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.kernels.reference.elements import largest, round_to_grid, spread, values_of
from fewbits.kernels.reference.scales import ideal

OWN = Path("conf", "hooks.py")
_OWN_MODULE = "fewbits_own_hooks"


@dataclass(frozen=True)
class Rest:
    """The stages after a hook. axis: along which blocks lie. quantizer: the last stage, unless it is a mixture."""

    axis: int
    quantizer: Quantizer | None
    turn: str  # the rotation of these stages, as the string form of a quantizer to FP32; "" without one
    apply: Callable[[Tensor, int, int], Tensor]

    def quantize(self, x: Tensor, *, axis: int | None = None, draw: int = 0) -> Tensor:
        """Return a matrix after the later stages. draw: tensors with different numbers get different random bits."""
        return self.apply(x, self.axis if axis is None else axis, draw)

    def rotate(self, x: Tensor) -> Tensor:
        """Return x as the later stages rotate it before they quantize it."""
        return call(torch.ops.fewbits.quantize, x, self.turn, self.axis, 0) if self.turn else x

    def rotate_back(self, x: Tensor) -> Tensor:
        return torch.ops.fewbits.unrotate(x, self.turn, self.axis) if self.turn else x


Values = Callable[..., Tensor]


@dataclass(frozen=True)
class Hook:
    """A registered function, its backward rule or None, and the defaults of its settings."""

    name: str
    values: Values
    backward: Values | None
    settings: Mapping[str, float]


HOOKS: dict[str, Hook] = {}


def hook(name: str, backward: Values | None = None) -> Callable[[Values], Values]:
    """Register a function under a name of small letters, digits and `-`. backward: its backward rule."""
    if not name.replace("-", "").isalnum() or name != name.lower():
        raise ValueError(f"hook {name!r}: valid are small letters, digits and -")

    def register(values: Values) -> Values:
        parameters = inspect.signature(values).parameters.values()
        defaults = {p.name: float(p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
        if name in HOOKS and HOOKS[name].values.__module__ != values.__module__:
            raise ValueError(f"hook {name!r} is defined twice: choose another name in {OWN}")
        HOOKS[name] = Hook(name, values, backward, defaults)
        return values

    return register


def find(name: str) -> Hook | None:
    """Return the hook with this name, fewbits' own or one of conf/hooks.py; None if there is none."""
    if name not in HOOKS and _OWN_MODULE not in sys.modules and OWN.is_file():
        spec = importlib.util.spec_from_file_location(_OWN_MODULE, OWN)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_OWN_MODULE] = module
        sys.path.insert(0, str(OWN.parent.absolute()))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_OWN_MODULE]
            raise
        finally:
            sys.path.remove(str(OWN.parent.absolute()))
    return HOOKS.get(name)


def is_own(name: str) -> bool:
    """Tell whether a hook is defined in conf/hooks.py."""
    found = find(name)
    return found is not None and not found.values.__module__.startswith("fewbits.")


@dataclass(frozen=True)
class HookStage:
    """A hook in a chain, with its settings."""

    name: str
    settings: tuple[tuple[str, float], ...] = ()
    needs_seed = draws_signs = False

    @staticmethod
    def parse(text: str) -> HookStage | None:
        """Parse NAME[:SETTING=NUMBER]…; return None if no hook has this name."""
        name, *listed = (part.strip() for part in text.split(":"))
        found = find(name) if name.replace("-", "").isalnum() else None
        if found is None:
            return None
        settings = {}
        for part in listed:
            key, _, value = part.partition("=")
            if key not in found.settings:
                raise ValueError(
                    f"hook {name}: unknown {part!r}: valid are {', '.join(found.settings) or 'no settings'}"
                )
            try:
                settings[key] = float(value)
            except ValueError:
                settings[key] = math.nan
            if not math.isfinite(settings[key]):
                raise ValueError(f"hook {name}: {part!r}: a finite number is expected")
        return HookStage(name, tuple(sorted(settings.items())))

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={value:g}" for key, value in self.settings)])

    @property
    def hook(self) -> Hook:
        found = find(self.name)
        if found is None:
            raise ValueError(f"hook {self.name!r} is not defined: valid are {', '.join(HOOKS)}, and those of {OWN}")
        return found

    def values(self, x: Tensor, rest: Rest) -> Tensor:
        return self.hook.values(x, rest, **dict(self.settings)).to(x.dtype)

    def gradient(self, gradient: Tensor, x: Tensor, rest: Rest) -> Tensor:
        """Return the gradient of x by the hook's backward rule. gradient: that by the straight-through rule."""
        rule = self.hook.backward
        if rule is None:
            return gradient
        return rule(gradient, x, rest, **{**self.hook.settings, **dict(self.settings)}).to(gradient.dtype)


# ------------------------------------------------------------------------------------------------ published methods


@hook("averis")
def averis(x: Tensor, rest: Rest) -> Tensor:
    """Quantize the mean over tokens and the rest apart (arXiv 2603.10444, eqs. 11 and 12)."""
    if rest.turn and rest.axis == 0:
        raise ValueError("averis: an operand of wgrad cannot be rotated, because the mean over tokens would be, too")
    mean = x.float().mean(0, keepdim=True).to(x.dtype)
    residual = (x.float() - mean.float()).to(x.dtype)
    return rest.quantize(residual).float() + rest.quantize(mean, axis=-1, draw=1).float()


@hook("occ")
def occ(x: Tensor, rest: Rest, *, quantile: float = 0.99) -> Tensor:
    """Quantize x clamped to two quantiles, and add what is clamped in high precision (arXiv 2501.17116, eq. 9)."""
    if not 0.5 < quantile < 1:
        raise ValueError(f"occ: quantile={quantile} is not between 0.5 and 1")
    flat = x.float().flatten()
    if not flat.numel():
        return rest.quantize(x)
    beyond = round((1 - quantile) * (flat.numel() - 1))  # the number of values beyond each quantile
    low, high = flat.kthvalue(beyond + 1).values, flat.kthvalue(flat.numel() - beyond).values
    clamped = x.float().clamp(low, high)
    return rest.quantize(clamped.to(x.dtype)).float() + rest.rotate((x.float() - clamped).to(x.dtype)).float()


def _dge(gradient: Tensor, x: Tensor, rest: Rest, *, k: float, most: float) -> Tensor:
    """Multiply by the derivative f' = |2t - 1|^(1/k - 1) / k, at most `most` (arXiv 2501.17116, eq. 8).

    t is the position of the scaled weight between the two values of the format around it, from 0 to 1.
    """
    q = rest.quantizer
    if q is None or q.traits.kind != "float" or rest.turn:
        raise ValueError(f"dge needs a quantizer with FP32 scales and no rotation, such as e2m1:channel:amax, not {q}")
    block = q.block.resolve(x.shape, rest.axis)
    factors = spread(ideal(largest(x.float(), block), q.format), block, x.shape)
    size = (x.float() * factors).abs().clamp(max=q.format.max)
    codes = torch.arange(q.format.max_code + 1, device=x.device)
    levels = values_of(codes, q.format)
    upper = torch.bucketize(size, levels, right=True).clamp(1, len(levels) - 1)
    low, high = levels[upper - 1], levels[upper]
    position = (2 * (size - low) / (high - low) - 1).abs()
    return gradient.float() * (position.pow(1 / k - 1) / k).clamp(max=most)


@hook("dge", backward=_dge)
def dge(x: Tensor, rest: Rest, *, k: float = 5.0, most: float = 3.0) -> Tensor:
    """Quantize as without the hook; the gradient is that of a smooth quantizer (arXiv 2501.17116)."""
    return rest.quantize(x)


# The clipping range, in standard deviations, that quantizes Gaussian values to 2^bits levels with the least error.
_RANGES = {1: 0.7978845587140913, 2: 1.4935346200015913, 3: 2.051068354131873, 4: 2.513930578568423}
_RANGES |= {5: 2.9160938834961225, 6: 3.276597282593217, 7: 3.6010497188221655, 8: 3.884938678807525}


def _uniform(x: Tensor, rest: Rest, bits: float) -> tuple[Tensor, Tensor]:
    """Return x rounded to 2^bits equidistant levels of each vector along the axis, and where it may have a gradient."""
    if bits not in _RANGES:
        raise ValueError(f"quest: bits={bits:g}: valid are {', '.join(map(str, _RANGES))}")
    turned = rest.quantize(x).float()
    deviation = turned.square().mean(rest.axis, keepdim=True).sqrt()
    scale = _RANGES[int(bits)] * deviation + 1e-8
    step = 2 * scale / (2**bits - 1)
    values = ((turned.clamp(-scale, scale) / step + 0.5).round() - 0.5) * step
    return values, (values - turned).abs() <= deviation * (_RANGES[int(bits)] / (2**bits - 1))


def _quest(gradient: Tensor, x: Tensor, rest: Rest, *, bits: float) -> Tensor:
    """Keep the gradient of rotated values whose error is at most half a step; the others are clipped (trust mask)."""
    return rest.rotate_back(rest.rotate(gradient) * _uniform(x, rest, bits)[1])


@hook("quest", backward=_quest)
def quest(x: Tensor, rest: Rest, *, bits: float = 4.0) -> Tensor:
    """Round rotated values to equidistant levels (arXiv 2502.05003); the later stage only rotates: bf16:rht128."""
    return _uniform(x, rest, bits)[0]


def _mxfp4(x: Tensor, rest: Rest) -> tuple[Tensor, Tensor]:
    """Return x in E2M1 with a power-of-two scale from the deviation of 32 values, and where it is not clipped."""
    turned = rest.quantize(x).float()
    lines = turned if rest.axis == -1 else turned.t()
    if lines.shape[-1] % 32:
        raise ValueError(f"quest-mxfp4: {lines.shape[-1]} values along the sum: expected a multiple of 32")
    blocks = lines.unflatten(-1, (-1, 32))
    deviation = (blocks.square().mean(-1, keepdim=True) - blocks.mean(-1, keepdim=True).square()).clamp(min=0).sqrt()
    exponent = torch.frexp(deviation * (2.92247856 / 6) + 1e-8)[1] - 1
    scaled = torch.ldexp(blocks, -exponent)
    grid = Quantizer("e2m1").format
    values = torch.ldexp(round_to_grid(scaled, grid).clamp(-grid.max, grid.max).float(), exponent).flatten(-2)
    inside = (scaled.abs() < grid.max).flatten(-2)
    return (values, inside) if rest.axis == -1 else (values.t(), inside.t())


def _quest_mxfp4(gradient: Tensor, x: Tensor, rest: Rest) -> Tensor:
    return rest.rotate_back(rest.rotate(gradient) * _mxfp4(x, rest)[1])


@hook("quest-mxfp4", backward=_quest_mxfp4)
def quest_mxfp4(x: Tensor, rest: Rest) -> Tensor:
    """Round rotated values to MXFP4 with clipping, the forward pass of Quartet (arXiv 2505.14669)."""
    return _mxfp4(x, rest)[0]


# ------------------------------------------------------------------------------------------------ chains

# A chain is several quantizers, one after the other, in one operand slot:
#
#     e2m1:1x32:e8m0 > e4m3:1x32:e8m0    the second quantizer quantizes the values that the first one returns
#     same > e2m1:1x16:eden:rht128       quantizes the values that the tensor's other GEMM reads (fprop.x for wgrad.x)
#     averis > e2m1:1x16:nvfp4           calls a hook, which calls the later stages
#
# The blocks of every stage lie along the dimension that the slot's GEMM sums over, except those of `same`. If the
# values of the other GEMM are rotated (Hadamard transform), they stay so, and the result of the GEMM is rotated back.

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
