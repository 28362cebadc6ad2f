"""Describe quantizers of other projects as data: an order of float32 operations, and how codes and scales are stored.

Projects that share a format's name round differently. A dialect is a quantizer with its `Steps`: each field is one
rounding step or special case, and the field's metadata lists the variants that are in use somewhere. `evaluate` is
plain torch and follows the record; `conformance.py` changes one field after the other to explain a difference. Each
operation below is rounded once to float32, unless its comment says otherwise.

Names: `amax` is the largest magnitude of a block, `tensor amax` of a tensor (or of a row), `top` the largest value of
the format. A stored block scale s and the tensor's decode scale d = 1 / g restore the value q · s · d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import codes_of, divide, fold, largest, power_of_two, split, spread, values_of

FLT_MAX = torch.finfo(torch.float32).max
_E4M3 = TABLE["e4m3"]


def _step(about: str, *variants: Any) -> Any:
    """Define a field whose default is the first variant."""
    return field(default=variants[0], metadata={"about": about, "variants": variants})


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps that all kinds of scales have: how a scaled element v becomes a code."""

    ties: str = _step("halfway between two values: to the even code, away from zero or to zero", "even", "away", "zero")
    saturation: str = _step("beyond the largest value: that value, NaN, or the next code", "largest", "nan", "wrap")
    zero_sign: str = _step(
        "sign of a result 0: that of v; positive, or negative, where v is ±0; always positive",
        *("of-v", "positive-of-zero", "negative-of-zero", "positive"),
    )
    zero_value: str = _step("value of the code of -0", "negative", "positive")
    nan_code: int = _step("code of v = NaN where the format has no NaN", 0, 7, 11, 12, 15)
    not_finite: str = _step(
        "a block with an infinity or NaN: by the formulas; NaN, and without effect on the tensor's scale",
        "formulas",
        "nan",
    )

    def variants(self) -> Iterator[tuple[str, Steps]]:
        """Yield (name of the step, a record in which this step alone differs) for all other variants."""
        for row in fields(self):
            for value in row.metadata["variants"]:
                if value != getattr(self, row.name):
                    yield row.name, replace(self, **{row.name: value})

    def changed(self, other: Steps) -> tuple[str, ...]:
        """Return the steps of `other` that differ, each as `name=value (here value)`."""
        pairs = ((row.name, getattr(other, row.name), getattr(self, row.name)) for row in fields(self))
        return tuple(f"{name}={theirs} (here {mine})" for name, theirs, mine in pairs if theirs != mine)


@dataclass(frozen=True, kw_only=True)
class TwoLevel(Steps):
    """Steps of narrow block scales s with a float32 scale for the tensor: NVFP4 and its relatives."""

    tensor_scale: str = _step(
        "g = target·top / amax; g = (1 / amax)·(target·top); d = amax / (target·top); or no tensor scale",
        *("encode", "encode-reciprocal", "decode", "none"),
    )
    tensor_group: str = _step("the tensor, or each row, has a tensor scale", "tensor", "row")
    target: float = _step("block scale of the largest block", 448.0, 256.0)
    tensor_zero: str = _step("g of a tensor of zeros", "one", "largest", "infinite")
    tensor_overflow: str = _step("g beyond the range of float32", "largest", "one", "infinite")
    tensor_infinite: str = _step("g of a tensor with an infinity", "zero", "one")
    block_scale: str = _step(
        "unrounded block scale u",
        "amax*(g*(1/top))",
        *("(amax/top)*g", "(amax*(1/top))*g", "(amax*g)/top", "(amax/top)/d", "amax/(top*d)"),
    )
    zero_block: str = _step("u of a block whose u is 0", "zero", "one")
    scale_underflow: str = _step(
        "a scale below the smallest: rounded; at least the smallest value, or the smallest normal value; 0.125 for 0",
        *("rounded", "smallest", "normal", "eighth"),
    )
    scale_overflow: str = _step("a scale beyond the largest", "largest", "nan")
    scale_rounding: str = _step(
        "rounding of u; `ggml`: ties up, at most 7 steps below the normal values, 448 from 248 on",
        *("nearest", "away", "floor", "up", "ggml"),
    )
    element: str = _step(
        "scaled element v",
        *("x*(1/(s*d))", "x/(s*d)", "x/(s/g)", "x*((1/d)/s)", "(x*g)*(1/s)", "(x/d)/s", "argmin|q*(s*d)-x|"),
    )
    product: str = _step("v is rounded to float32, or its last product is exact (fused)", "rounded", "fused")
    factor_overflow: str = _step("a factor of x beyond the range of float32", "largest", "infinite")
    zero_scale: str = _step("v where s is 0: by the formula, 0 with the sign of x, or 0", "formula", "signed", "zero")
    choice: str = _step(
        "one scale, or the better of u and 1.5·u by mean absolute or squared error", "none", "mae", "mse"
    )
    choice_sum: str = _step("order of the sum of errors", "sequential", "torch")
    decode: str = _step("value", "(q*s)*d", "q*(s*d)", "q*(s/g)", "((q*s)*amax)/(target*top)")


@dataclass(frozen=True, kw_only=True)
class Power(Steps):
    """Steps of block scales that are powers of two, 2^e with e from -127 to 127: the MX formats."""

    exponent: str = _step(
        "e: floor or ceil of log2(amax), or floor after amax is rounded to the format's mantissa or to one bit, minus "
        "the format's largest exponent; or ceil of log2(amax / top)",
        *("floor", "ceil", "even", "even-1", "quotient"),
    )
    quotient: str = _step("amax / top", "division", "reciprocal", "exact")
    logarithm: str = _step("log2 from the bits, or rounded to float32", "bits", "float")
    scale_underflow: str = _step(
        "e below -127: limited; -126 for a subnormal amax / top; modulo 256", "limited", "next", "modulo"
    )
    zero_block: str = _step("scale of a block of zeros", "smallest", "one")
    smallest_scale: str = _step("divisor of elements where the scale is 2^-127", "exact", "normal", "one", "zero")
    nan_scale: str = _step(
        "scale of a block with NaN: NaN, by which its elements are divided, or by infinity; the smallest",
        *("nan", "nan-infinity", "smallest"),
    )
    element: str = _step("code of an element", "x/scale", "argmin|q*scale-x|")


@dataclass(frozen=True, kw_only=True)
class Float(Steps):
    """Steps of float32 block scales."""

    block_scale: str = _step("encode factor g", "top/amax", "(1/amax)*top", "1/(amax/top)")
    power: str = _step("g as it is, or rounded down to a power of two", "none", "floor")
    zero_block: str = _step("g of a block of zeros", "one", "largest")
    element: str = _step("scaled element v", "x*g", "x/(1/g)")


@dataclass(frozen=True)
class Layout:
    """How a project stores the result.

    tensor: the stored tensor scale is `d`, `g`, the tensor's `amax`, or `none`.
    nibbles: of 4-bit codes. `low`: the low bits of a byte have the even column; `halves`: the first half of a block.
    swizzled: one-byte scales are in cuBLAS's 128x4 order (`packing.swizzle`), padded by zeros.
    """

    tensor: str = "none"
    nibbles: str = "low"
    swizzled: bool = False


@dataclass(frozen=True)
class Dialect:
    """A quantizer of another project. `undefined` names the kinds of tensors for which the source states no result."""

    name: str
    quantizer: str
    steps: Steps
    layout: Layout
    source: str
    partial_blocks: bool
    undefined: tuple[str, ...] = ()

    @property
    def format(self) -> Format:
        return Quantizer.parse(self.quantizer).format

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return Quantizer.parse(self.quantizer).block.resolve(shape)


@dataclass(frozen=True)
class Encoded:
    """Codes [rows, columns] and scales [blocks down, blocks across] as int32; tensor scale and values as float32."""

    codes: Tensor
    scales: Tensor
    tensor: Tensor
    values: Tensor


def evaluate(x: Tensor, dialect: Dialect, steps: Steps | None = None) -> Encoded:
    """Quantize a matrix in plain torch; `steps` replaces those of the dialect."""
    x, steps = x.detach().float(), steps or dialect.steps
    evaluator, nan = _EVALUATORS[type(steps)]
    if steps.not_finite == "formulas":
        return evaluator(x, dialect, steps)
    block = dialect.block((x.shape[0], x.shape[1]))
    bad = ~largest(x, block).isfinite()
    wide = spread(bad, block, x.shape)
    rest = evaluator(torch.where(wide, 0, x), dialect, steps)
    codes, values = torch.where(wide, 0, rest.codes), torch.where(wide, math.nan, rest.values)
    return Encoded(codes, torch.where(bad, nan, rest.scales), rest.tensor, values)


def _two_level(x: Tensor, dialect: Dialect, steps: TwoLevel) -> Encoded:
    grid, block = dialect.format, dialect.block((x.shape[0], x.shape[1]))
    amax = largest(x, block)
    tensor_amax = amax.amax(1, keepdim=True) if steps.tensor_group == "row" else amax.amax().view(1, 1)
    g, d = _tensor_scales(tensor_amax, grid.max, steps)
    top = torch.full_like(g, grid.max)
    u = {
        "amax*(g*(1/top))": lambda: amax * (g * (1 / top)),
        "(amax/top)*g": lambda: amax / top * g,
        "(amax*(1/top))*g": lambda: amax * (1 / top) * g,
        "(amax*g)/top": lambda: amax * g / top,
        "(amax/top)/d": lambda: amax / top / d,
        "amax/(top*d)": lambda: amax / (top * d),
    }[steps.block_scale]()

    def encoded(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = _stored_scale(u, steps)
        wide = spread(s, block, x.shape)
        if steps.element == "argmin|q*(s*d)-x|":
            return s, *_nearest(x, wide * d, grid)
        return s, *_elements(_scaled(x, wide, g, d, steps), grid, steps)

    def amax_form(q: Tensor, s: Tensor) -> Tensor:
        return q * spread(s, block, x.shape) * tensor_amax / (steps.target * grid.max)

    s, codes, q = encoded(u)
    if steps.choice != "none":
        four = encoded(u * 1.5)
        errors = []
        for scale, values in ((four[0], four[2]), (s, q)):
            difference = amax_form(values, scale) - x
            folded = fold(difference.abs() if steps.choice == "mae" else difference * difference, block)
            errors.append(_sum(folded.transpose(1, 2).flatten(2), steps.choice_sum))
        better = errors[0] < errors[1]
        s = torch.where(better, four[0], s)
        codes = torch.where(spread(better, block, x.shape), four[1], codes)
    q = _decoded(codes, grid, steps)
    wide = spread(s, block, x.shape)
    values = {
        "(q*s)*d": lambda: q * wide * d,
        "q*(s*d)": lambda: q * (wide * d),
        "q*(s/g)": lambda: q * (wide / g),
        "((q*s)*amax)/(target*top)": lambda: amax_form(q, s),
    }[steps.decode]()
    tensor = {"d": d, "g": g, "amax": tensor_amax, "none": d.new_empty(0)}[dialect.layout.tensor]
    return Encoded(codes, codes_of(s, _E4M3), tensor.flatten(), values)


def _tensor_scales(amax: Tensor, top: float, steps: TwoLevel) -> tuple[Tensor, Tensor]:
    """Return (g, d) for each tensor amax; one is computed from amax, and the other is its reciprocal."""
    if steps.tensor_scale == "none":
        return torch.ones_like(amax), torch.ones_like(amax)
    limit = torch.full_like(amax, steps.target * top)
    special = {"one": 1.0, "largest": FLT_MAX, "infinite": math.inf}
    zero, beyond = (torch.full_like(amax, special[name]) for name in (steps.tensor_zero, steps.tensor_overflow))
    if steps.tensor_scale == "decode":
        d = amax / limit
        d = torch.where(amax == 0, 1 / zero, torch.where(d == 0, 1 / beyond, d))
        return 1 / d, d
    g = limit / amax if steps.tensor_scale == "encode" else amax.reciprocal() * limit
    g = torch.where(amax == 0, zero, torch.where(g.isinf(), beyond, g))
    g = torch.where(g == 0, 1, g) if steps.tensor_infinite == "one" else g
    return g, 1 / g


def _stored_scale(u: Tensor, steps: TwoLevel) -> Tensor:
    if steps.zero_block == "one":
        u = torch.where(u == 0, 1, u)
    least = {"smallest": _E4M3.min_subnormal, "normal": _E4M3.min_normal}.get(steps.scale_underflow)
    u = u if least is None else u.clamp(min=least)
    u = u.clamp(max=_E4M3.max) if steps.scale_overflow == "largest" else u
    if steps.scale_rounding == "ggml":
        small = (u * 512 + 0.5).floor().clamp(max=7) / 512
        s = torch.where(u < _E4M3.min_normal, small, _rounded(u, _E4M3, "away"))
        s = torch.where(s >= 256, _E4M3.max, s)
    else:
        s = _rounded(u, _E4M3, {"nearest": "even"}.get(steps.scale_rounding, steps.scale_rounding))
    s = torch.where(s > _E4M3.max, math.nan, s).float()
    return torch.where(s == 0, 0.125, s) if steps.scale_underflow == "eighth" else s


def _scaled(x: Tensor, s: Tensor, g: Tensor, d: Tensor, steps: TwoLevel) -> Tensor:
    """Return v; in float64 if the last product is exact."""

    def times(a: Tensor, factor: Tensor) -> Tensor:
        factor = factor.clamp(max=FLT_MAX) if steps.factor_overflow == "largest" else factor
        return a.double() * factor.double() if steps.product == "fused" else a * factor

    v = {
        "x*(1/(s*d))": lambda: times(x, 1 / (s * d)),
        "x/(s*d)": lambda: x / (s * d),
        "x/(s/g)": lambda: x / (s / g),
        "x*((1/d)/s)": lambda: times(x, 1 / d / s),
        "(x*g)*(1/s)": lambda: times(x * g, 1 / s),
        "(x/d)/s": lambda: x / d / s,
    }[steps.element]()
    if steps.zero_scale == "formula":
        return v
    zero = torch.zeros_like(v)
    return torch.where(s == 0, zero.copysign(x.to(v.dtype)) if steps.zero_scale == "signed" else zero, v)


def _sum(errors: Tensor, order: str) -> Tensor:
    if order == "torch":
        return errors.contiguous().sum(-1)
    total = torch.zeros_like(errors[..., 0])
    for i in range(errors.shape[-1]):
        total = total + errors[..., i]
    return total


def _power(x: Tensor, dialect: Dialect, steps: Power) -> Encoded:
    grid, block = dialect.format, dialect.block((x.shape[0], x.shape[1]))
    amax = largest(x, block)
    top = torch.full_like(amax, grid.max)
    if steps.exponent == "quotient":
        quotient = {
            "division": lambda: amax / top,
            "reciprocal": lambda: amax * (1 / top),
            "exact": lambda: amax.double() / top.double(),
        }[steps.quotient]()
        e = _log2(quotient, steps.logarithm, up=True)
    else:
        quotient = amax
        if steps.exponent in ("even", "even-1"):
            half = 1 << 22 - (1 if steps.exponent == "even-1" else grid.mantissa_bits)
            quotient = ((amax.view(torch.int32) + half) & 0x7F800000).view(torch.float32)
            e = _log2(quotient, steps.logarithm) - grid.emax
        else:
            e = _log2(quotient, steps.logarithm, up=steps.exponent == "ceil") - grid.emax
    codes = e + 127
    codes = codes & 255 if steps.scale_underflow == "modulo" else codes.clamp(0, 254)
    if steps.scale_underflow == "next":
        codes = torch.where(quotient < 2.0**-126, 1, codes)
    codes = torch.where(amax == 0, 127 if steps.zero_block == "one" else 0, codes)
    codes = torch.where(amax.isnan(), 0 if steps.nan_scale == "smallest" else 255, codes)
    scale = torch.where(codes == 255, math.nan, power_of_two(codes - 127))
    smallest = {"exact": 2.0**-127, "normal": 2.0**-126, "one": 1.0, "zero": 0.0}[steps.smallest_scale]
    divisor = torch.where(codes == 0, smallest, scale)
    divisor = divisor.nan_to_num(math.inf) if steps.nan_scale == "nan-infinity" else divisor
    if steps.element == "x/scale":
        elements, _ = _elements((x.double() / spread(divisor, block, x.shape)).float(), grid, steps)
    else:
        elements, _ = _nearest(x, spread(scale, block, x.shape).float(), grid)
    values = (_decoded(elements, grid, steps).double() * spread(scale, block, x.shape)).float()
    return Encoded(elements, codes.to(torch.int32), x.new_empty(0), values)


def _log2(a: Tensor, how: str, up: bool = False) -> Tensor:
    """Return the floor, or the ceiling, of log2(a) for a > 0, as an integer; -1022 for 0, and 128 for infinity."""
    if how == "float":
        rounded = torch.log2(a.float())
        return (rounded.ceil() if up else rounded.floor()).clamp(-1022, 128).long()
    mantissa, exponent = split(a)
    return torch.where(a.isfinite(), exponent.long() + (up & (mantissa > 1)).long(), 128)


def _float(x: Tensor, dialect: Dialect, steps: Float) -> Encoded:
    grid, block = dialect.format, dialect.block((x.shape[0], x.shape[1]))
    amax = largest(x, block)
    top = torch.full_like(amax, grid.max)
    g = {
        "top/amax": lambda: top / amax,
        "(1/amax)*top": lambda: amax.reciprocal() * top,
        "1/(amax/top)": lambda: 1 / (amax / top),
    }[steps.block_scale]()
    g = torch.where(g.isinf(), FLT_MAX, g)
    if steps.power == "floor":
        g = power_of_two(split(g)[1]).float()
    g = torch.where(amax == 0, 1.0 if steps.zero_block == "one" else FLT_MAX, g)
    d = divide(1, g)
    wide_g, wide_d = (spread(scale, block, x.shape) for scale in (g, d))
    codes, _ = _elements(x * wide_g if steps.element == "x*g" else x / wide_d, grid, steps)
    return Encoded(codes, d.view(torch.int32), x.new_empty(0), _decoded(codes, grid, steps) * wide_d)


def _elements(v: Tensor, grid: Format, steps: Steps) -> tuple[Tensor, Tensor]:
    """Return the codes of v, and the values to which v was rounded; codes that wrap have other values."""
    rounded = _rounded(v, grid, steps.ties)
    magnitude = rounded.abs()
    if steps.saturation == "largest":
        magnitude = torch.where(magnitude > grid.max, grid.max, magnitude)
    elif steps.saturation == "nan" and grid.has_nan:
        magnitude = torch.where(magnitude > grid.max, math.nan, magnitude)
    negative = v.signbit()
    if steps.zero_sign == "negative-of-zero":
        negative |= v == 0
    elif steps.zero_sign != "of-v":
        negative &= (v if steps.zero_sign == "positive-of-zero" else rounded) != 0
    codes = codes_of(torch.where(magnitude.isfinite(), magnitude, 0), grid)
    codes = (codes | negative.int() << grid.bits - 1) & (1 << grid.bits) - 1
    codes = torch.where(magnitude.isfinite(), codes, grid.code_of(math.nan) if grid.has_nan else steps.nan_code)
    return codes.int(), torch.where(negative, -magnitude, magnitude).float()


def _nearest(x: Tensor, scale: Tensor, grid: Format) -> tuple[Tensor, Tensor]:
    """Return the first code whose value times the scale, in float32, is nearest to x, and its value."""
    values = torch.tensor(grid.values())
    codes = (values * scale[..., None] - x[..., None]).abs().nan_to_num(math.inf, math.inf).argmin(-1)
    return codes.int(), values[codes]


def _decoded(codes: Tensor, grid: Format, steps: Steps) -> Tensor:
    values = values_of(codes, grid)
    return torch.where(values == 0, 0.0, values) if steps.zero_value == "positive" else values


def _rounded(v: Tensor, grid: Format, how: str) -> Tensor:
    """Return v rounded to multiples of the format's spacing at v, in float64, as if it had no largest value."""
    step = power_of_two(split(v)[1].clamp(grid.emin, 127) - grid.mantissa_bits)
    steps = v.double().abs() / step
    steps = {
        "even": steps.round(),
        "away": (steps + 0.5).floor(),
        "zero": (steps - 0.5).ceil(),
        "floor": steps.floor(),
        "up": steps.ceil(),
    }[how]
    return torch.copysign(steps * step, v.double())


_EVALUATORS: dict[type[Steps], tuple[Any, int]] = {  # and the code of a scale that is NaN
    TwoLevel: (_two_level, 0x7F),
    Power: (_power, 0xFF),
    Float: (_float, 0x7FC00000),
}

_NVFP4, _MXFP4, _MXFP8 = "e2m1:1x16:nvfp4", "e2m1:1x32:mx", "e4m3:1x32:mx"
_TE, _AO = "transformer-engine 2.20.2, custom_recipes", "torchao 0.18.0, prototype/mx_formats"
_MO, _CT = "nvidia-modelopt 0.47.0, torch/quantization/qtensor", "compressed-tensors 0.20.1"
_FOUR, _GG, _CU = "fouroversix 1.0.5, quantize/pytorch/reference.py", "gguf 0.19.0, quants.py", "cuBLAS documentation"

# fmt: off
_TE_STEPS = TwoLevel(
    tensor_zero="largest", tensor_infinite="one", zero_sign="positive-of-zero", decode="((q*s)*amax)/(target*top)",
)
_AO_STEPS = TwoLevel(
    tensor_scale="decode", tensor_zero="infinite", tensor_overflow="infinite", block_scale="(amax/top)/d",
    scale_underflow="normal", element="x*((1/d)/s)", factor_overflow="infinite", nan_code=12, decode="q*(s*d)",
)
_AO_ONE = TwoLevel(tensor_scale="none", block_scale="(amax/top)*g", scale_underflow="normal", decode="q*(s*d)")
_AO_MX = {
    **{
        rule: Power(exponent=rule, smallest_scale="normal", nan_scale="nan-infinity")
        for rule in ("floor", "ceil", "even")
    },
    "rceil": Power(exponent="quotient", logarithm="float", smallest_scale="one"),
}
_MO_STEPS = TwoLevel(
    tensor_scale="decode", tensor_zero="infinite", tensor_overflow="infinite", block_scale="amax/(top*d)",
    zero_block="one", scale_underflow="smallest", element="x/(s*d)", zero_sign="positive-of-zero",
    zero_value="positive", nan_code=7, decode="q*(s*d)",
)
_CT_STEPS = TwoLevel(
    tensor_scale="encode-reciprocal", tensor_overflow="one", block_scale="(amax/top)*g", scale_underflow="eighth",
    element="x/(s/g)", zero_sign="positive-of-zero", decode="q*(s/g)",
)
_FOUR_STEPS = TwoLevel(
    tensor_overflow="infinite", block_scale="(amax/top)*g", factor_overflow="infinite", zero_scale="zero",
    saturation="wrap", zero_sign="positive-of-zero", nan_code=11, choice_sum="torch",
    decode="((q*s)*amax)/(target*top)",
)
_GG_STEPS = TwoLevel(
    tensor_scale="none", block_scale="(amax/top)*g", scale_rounding="ggml", element="argmin|q*(s*d)-x|",
)
_GG_MX = Power(exponent="floor", logarithm="float", scale_underflow="modulo", element="argmin|q*scale-x|")
_MO_MX = Power(exponent="quotient", logarithm="float", nan_scale="smallest")
_FOUR_MX = Power(
    exponent="quotient", scale_underflow="next", smallest_scale="zero", saturation="wrap",
    zero_sign="positive-of-zero", nan_code=11,
)
_CU_STEPS = TwoLevel(tensor_scale="none", block_scale="(amax/top)*g", decode="q*(s*d)")
_ROWS: tuple[tuple[str, str, Steps, Layout, str, bool], ...] = (  # the last: partial blocks are accepted
    ("te-nvfp4", _NVFP4, _TE_STEPS, Layout("amax"), f"{_TE}/reference_nvfp4.py", True),
    ("te-nvfp4-row", _NVFP4, replace(_TE_STEPS, tensor_group="row"), Layout("amax"), f"{_TE}/reference_nvfp4.py", True),
    *(
        (f"te-4over6-{error}-{top}", "e2m1:1x16:fouroversix",
         replace(_TE_STEPS, block_scale="(amax/top)*g", choice=error, target=float(top)), Layout("amax"),
         f"{_TE}/reference_nvfp4.py", True)
        for error in ("mae", "mse") for top in (448, 256)
    ),
    ("te-mxfp8", _MXFP8, Power(exponent="quotient", quotient="reciprocal", smallest_scale="one"), Layout(),
     "transformer-engine, common/util/ptx.cuh (float_to_e8m0, exp2f_rcp), read and not run", False),
    ("te-fp8-block", "e4m3:1x128:amax", Float(power="floor"), Layout(),
     f"{_TE}/reference_current_scaling.py (_scale_from_amax_tensor)", False),
    ("torchao-nvfp4", _NVFP4, _AO_STEPS, Layout("d"), f"{_AO}/nvfp4_tensor.py", False),
    ("torchao-nvfp4-one-level", _NVFP4, _AO_ONE, Layout(), f"{_AO}/nvfp4_tensor.py, per_tensor_scale=None", False),
    *(
        (f"torchao-mxfp{bits}-{rule}", quantizer, steps, Layout(), f"{_AO}/mx_tensor.py", False)
        for bits, quantizer in ((8, _MXFP8), (4, _MXFP4)) for rule, steps in _AO_MX.items()
    ),
    ("modelopt-nvfp4", _NVFP4, _MO_STEPS, Layout("d"), f"{_MO}/nvfp4_tensor.py, dynamic scales", False),
    ("modelopt-mxfp4", _MXFP4, replace(_MO_MX, ties="zero", zero_sign="negative-of-zero"), Layout(),
     f"{_MO}/mxfp4_tensor.py", False),
    ("modelopt-mxfp8", _MXFP8, _MO_MX, Layout(), f"{_MO}/mxfp8_tensor.py", False),
    ("compressed-tensors-nvfp4", _NVFP4, _CT_STEPS, Layout("g"), f"{_CT}, generate_gparam, calculate_qparams", False),
    ("compressed-tensors-mxfp4", _MXFP4, Power(exponent="even-1", zero_sign="positive-of-zero"), Layout(),
     f"{_CT}, generate_mx_scales", False),
    ("fouroversix-nvfp4-6", _NVFP4, _FOUR_STEPS, Layout("amax"), _FOUR, False),
    *(
        (f"fouroversix-nvfp4-{error}", _NVFP4, replace(_FOUR_STEPS, choice=error, target=256.0), Layout("amax"),
         _FOUR, False)
        for error in ("mae", "mse")
    ),
    ("fouroversix-mxfp4", _MXFP4, _FOUR_MX, Layout(), _FOUR, False),
    ("gguf-nvfp4", _NVFP4, _GG_STEPS, Layout(nibbles="halves"),
     f"ggml-quants.c (quantize_row_nvfp4_ref); scales: {_GG} (NVFP4.fp32_to_ue4m3)", False),
    ("gguf-mxfp4", _MXFP4, _GG_MX, Layout(nibbles="halves"), f"{_GG} (MXFP4)", False),
    *(
        (f"ocp-mx{name}", f"{format_}:1x32:mx", Power(exponent="floor"), Layout(),
         "OCP Microscaling Formats v1.0, section 6.3; gfloat 0.5.2, block.py (quantize_block); ml_dtypes 0.6.0", False)
        for name, format_ in
        (("fp8", "e4m3"), ("fp8-e5m2", "e5m2"), ("fp6-e3m2", "e3m2"), ("fp6-e2m3", "e2m3"), ("fp4", "e2m1"))
    ),
    ("cublas-vec16", _NVFP4, _CU_STEPS, Layout(swizzled=True),
     f"{_CU}, 1D Block Quantization; x is already multiplied by the tensor scale", True),
    ("cublas-vec32", _MXFP8, Power(exponent="quotient"), Layout(swizzled=True), f"{_CU}, 1D Block Quantization", True),
    ("fewbits-nvfp4", _NVFP4, TwoLevel(zero_scale="signed", not_finite="nan"), Layout("d"),
     "fewbits, arithmetic.md", True),
    ("fewbits-mxfp8", _MXFP8, Power(exponent="floor", zero_block="one", not_finite="nan"), Layout(),
     "fewbits, arithmetic.md", True),
)
_NAN, _NOT_FINITE = ("nan",), ("infinite", "nan")
_UNDEFINED = {  # documentation that states no result, and packages whose result depends on the bits of a NaN
    "te-mxfp8": _NOT_FINITE,
    "torchao-nvfp4": ("subnormal",), "torchao-nvfp4-one-level": _NAN,
    **{f"torchao-mxfp4-{rule}": _NAN for rule in _AO_MX},
    "modelopt-mxfp4": _NOT_FINITE,
    "compressed-tensors-nvfp4": _NAN, "compressed-tensors-mxfp4": (*_NOT_FINITE, "huge"),
    "fouroversix-mxfp4": _NOT_FINITE,
    "gguf-nvfp4": _NAN, "gguf-mxfp4": (*_NOT_FINITE, "subnormal"),
    **{row[0]: _NOT_FINITE for row in _ROWS if row[0].startswith("ocp")},
    "cublas-vec16":
        (*_NOT_FINITE, "zeros", "zero blocks", "signed zeros", "tiny", "subnormal", "small blocks",
         *(f"scale ties{i}" for i in ("", " 2", " 3", " 4"))),
    "cublas-vec32": _NOT_FINITE,
}
# fmt: on

DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {row[0]: Dialect(*row, undefined=_UNDEFINED.get(row[0], ())) for row in _ROWS}
)
