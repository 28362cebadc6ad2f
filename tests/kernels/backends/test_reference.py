"""Compare the reference backend with other libraries, published test vectors, and computations with exact fractions.

None of these shares code with the reference.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fewbits.kernels.backends.reference import (
    decode,
    encode,
    extent,
    quantize,
    rotate,
    sample_weight,
    sample_weight_backward,
)
from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.packing import scale_codes, unpack
from fewbits.kernels.quantizer import HADAMARD_SIZES, Quantizer
from fewbits.kernels.reference.elements import round_to_grid
from fewbits.kernels.reference.noise import (
    gaussian_nibbles,
    gaussian_noise,
    philox,
    philox4x32,
    uniform,
    uniform_noise,
    unpack_noise,
)
from fewbits.kernels.reference.rotation import hadamard_signs
from fewbits.kernels.reference.weights import exp2
from tests.effort import DEEP
from tests.kernels.inputs import DTYPES, assert_same, generator

FLT_MAX = float(np.finfo(np.float32).max)

NARROW = ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "bf16", "fp16")

# A sample that covers every scaling, block shape, format family and option.
QUANTIZERS = [
    "bf16",
    "fp16:stochastic",
    "fp32",
    "e4m3:stochastic:overflow=nan",
    "e5m2:overflow=inf",
    "e5m2:rht16",
    "e4m3:tensor:amax",
    "e3m4:channel:amax:overflow=inf",
    "e4m3:8x8:gam",
    "e5m2:3x5:gam:group=row:stochastic",
    "e2m3:1x16:gam:rht8",
    "e4m3:1x32:mx",
    "e2m1:1x32:mx:stochastic:rht32",
    "e3m2:4x4:e8m0",
    "e1m1:channel:e8m0",
    "bf16:2x7:mx",
    "e2m1:1x16:nvfp4",
    "e2m1:1x16:nvfp4:stochastic:rht16",
    "e2m1:16x16:nvfp4:rht4:signs=none",
    "e4m3:1x4:nvfp4:overflow=nan",
    "e5m2:2x4:nvfp4:overflow=inf",
    "bf16:1x4:nvfp4",
    "e2m1:1x16:ue5m3",
    "e2m1:16x16:ue5m3:stochastic",
    "e2m1:1x16:fouroversix",
    "e2m1:16x16:fouroversix:stochastic:rht16",
    "e2m1:1x16:eden:rht16",
]


def coded(x: Tensor, q: Quantizer, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode x; return the codes of elements (unpacked), the codes of block scales, and the group scales."""
    data, scales, groups = encode(x, q, axis, seed)
    return unpack(data, q.format.bits, x.shape[1]), scale_codes(scales), groups


def wild(rows: int, cols: int, seed: int, octaves: float = 12) -> Tensor:
    """Return normal numbers times 2^(octaves · another normal number), with zeros of both signs among them."""
    g = generator(seed)
    x = torch.randn(rows, cols, generator=g) * torch.exp2(octaves * torch.randn(rows, cols, generator=g))
    x[torch.rand(rows, cols, generator=g) < 0.05] = 0.0
    x[torch.rand(rows, cols, generator=g) < 0.05] = -0.0
    return x


def cast(x: Tensor, q: str | Quantizer) -> Tensor:
    """Return x, quantized along rows with seed 0; a vector is quantized as a matrix of one row."""
    quantizer = Quantizer.parse(q) if isinstance(q, str) else q
    return quantize(x.reshape(1, -1) if x.dim() == 1 else x, quantizer, -1, 0)[0].reshape(x.shape)


# Elements


def all_bf16() -> Tensor:
    return torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()


@pytest.fixture(scope="module")
def float32_patterns() -> Tensor:
    """Return every finite bf16, and the finite ones of 2^20 (deep: 2^22) random float32 bit patterns.

    A third of the random numbers have exponents from −28 to 17, which are near the ranges of narrow formats.
    """
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << 32, 1 << (22 if DEEP else 20), dtype=np.uint32)
    near = patterns[: len(patterns) // 3]
    near[:] = near & 0x807FFFFF | rng.integers(127 - 28, 127 + 18, len(near), dtype=np.uint32) << 23
    x = torch.cat([torch.from_numpy(patterns.view(np.float32)), all_bf16()])
    return x[x.isfinite()]


ML_DTYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
TORCH_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@pytest.mark.parametrize("name", NARROW)
def test_nearest_is_that_of_ml_dtypes_and_torch(name: str, float32_patterns: Tensor) -> None:
    grid_max = TABLE[name].max
    clamped = float32_patterns.clamp(-grid_max, grid_max)
    got = cast(float32_patterns, name)
    assert_same(got, torch.from_numpy(clamped.numpy().astype(ML_DTYPES[name]).astype(np.float32)))
    if name in TORCH_DTYPES:
        assert_same(got, clamped.to(TORCH_DTYPES[name]).float())


@pytest.mark.parametrize("name", [*NARROW, "e3m1", "e5m3", "e4m3ieee", "e5m10finite", "fp32"])
def test_nearest_and_its_code_are_those_of_the_scalar_rounding(name: str) -> None:
    grid = Format.parse(name)
    x = wild(1, 2000, seed=2)
    for overflow in grid.overflows:
        q = Quantizer(grid, overflow=overflow)
        want = [grid.code_of(v, overflow) for v in x.flatten().tolist()]
        want = [grid.code_of(math.nan) if math.isnan(grid.decode(code)) else code for code in want]  # NaN has no sign
        if grid.bits <= 16:  # wider codes are not stored
            assert coded(x, q, -1, 0)[0].flatten().tolist() == want
        assert_same(cast(x, q).flatten(), torch.tensor([grid.decode(code) for code in want]))


@pytest.mark.parametrize("name", NARROW)
def test_beyond_max_is_what_would_round_beyond_it(name: str) -> None:
    """Check overflow next to the tie beyond a format's largest value: the tie itself overflows if its code is odd."""
    grid = TABLE[name]
    half_step = math.ldexp(1.0, grid.emax - grid.mantissa_bits - 1)
    tie = np.float32(grid.max + half_step)
    max_is_even = grid.max_code % 2 == 0
    inside, outside = (np.nextafter(tie, np.float32(to)) for to in (0, np.inf))
    x = torch.tensor([inside, -inside, tie, -tie, outside, -outside, FLT_MAX, -FLT_MAX])
    over = torch.tensor([False, False, *[not max_is_even] * 2, True, True, True, True])
    limit = torch.copysign(torch.full_like(x, grid.max), x)
    for overflow in grid.overflows:
        beyond = {"saturate": limit, "nan": torch.full_like(x, math.nan), "inf": limit.sign() * math.inf}[overflow]
        assert_same(cast(x, Quantizer(grid, overflow=overflow)), torch.where(over, beyond, limit))


@pytest.mark.parametrize("name", NARROW)
def test_without_blocks_only_infinities_that_the_format_has_stay(name: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    for overflow, rounding in product(TABLE[name].overflows, ("nearest", "stochastic")):
        got = cast(x, Quantizer(name, overflow=overflow, rounding=rounding))  # type: ignore[arg-type]
        inf = math.inf if TABLE[name].has_inf else math.nan
        assert_same(got, torch.tensor([inf, -inf, math.nan, 1.0]))


# Randomness


def scalar_philox(counter: tuple[int, ...], seed: int) -> list[int]:
    c, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % (1 << 32), (key[1] + 0xBB67AE85) % (1 << 32)]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (" ".join(["ffffffff"] * 4), "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, want: str) -> None:
    c, k, w = ([int(word, 16) for word in text.split()] for text in (counter, key, want))
    assert philox4x32([torch.tensor(word) for word in c], (k[0], k[1])).tolist() == w
    assert scalar_philox(tuple(c), k[0] | k[1] << 32) == w  # the oracle of the tests below


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 0x123456789ABCDEF0, (1 << 63) - 1])
def test_each_element_draws_its_own_48_bits(seed: int) -> None:
    got = uniform(1003, seed, "cpu").tolist()
    for i in (0, 1, 2, 7, 8, 9, 500, 1001, 1002):
        word = scalar_philox((i // 8, 0, 0, 0), seed)[i // 2 % 4]
        high = word & 0xFFFF if i % 2 == 0 else word >> 16
        low = scalar_philox((i // 4, 0, 1, 0), seed)[i % 4]
        assert got[i] == float(Fraction(high << 32 | low, 1 << 48))


def test_philox_takes_indices_beyond_32_bits_in_any_shape() -> None:
    index = torch.tensor([[0, (1 << 32) + 5], [1 << 40, 3]])
    got = philox(index, 2, 77)
    assert got.shape == (2, 2, 4)
    want = [[scalar_philox((i & 0xFFFFFFFF, i >> 32, 2, 0), 77) for i in row] for row in index.tolist()]
    assert got.tolist() == want


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "bf16"])
def test_stochastic_takes_the_other_neighbour_when_the_draw_is_below_the_distance(name: str) -> None:
    grid = TABLE[name]
    x = wild(40, 25, seed=3, octaves=3).clamp(-grid.max, grid.max)
    draws = uniform(x.numel(), 9, "cpu").tolist()
    want = []
    for v, u in zip(x.flatten().tolist(), draws, strict=True):
        step = Fraction(2) ** (max(math.frexp(v)[1] - 1, grid.emin) - grid.mantissa_bits)
        steps = Fraction(v) / step
        nearest = round(steps)
        if Fraction(u) < abs(steps - nearest):
            nearest += 1 if steps > nearest else -1
        want.append(math.copysign(float(nearest * step), v))
    for axis in (-1, 0):  # the draw depends on the element's index, whatever the axis
        assert_same(
            quantize(x, Quantizer.parse(f"{name}:stochastic"), axis, 9)[0].flatten(),
            torch.tensor(want).clamp(-grid.max, grid.max),
        )


def test_a_draw_is_below_the_distance_or_not_to_the_last_bit() -> None:
    last = 2.0**-48
    # The value, the draw and the result; values and results are in steps of the grid. The value is rounded to nearest
    # first, a tie to even, and moves to its other neighbour if the draw is below its distance from the nearest one.
    cases = [
        (0.25, 0.25, 0.0),
        (0.25, 0.25 - last, 1.0),
        (0.75, 0.25, 1.0),
        (0.75, 0.25 - last, 0.0),
        (0.5, 0.5, 0.0),
        (0.5, 0.5 - last, 1.0),
        (1.5, 0.5, 2.0),
        (1.5, 0.5 - last, 1.0),
        (last, last, 0.0),
        (last, 0.0, 1.0),
        (1.0, 0.0, 1.0),
        (-0.25, 0.25, -0.0),
        (-0.25, 0.0, -1.0),
        (-0.75, 0.0, -0.0),
    ]
    steps, draws, want = torch.tensor(cases, dtype=torch.float64).unbind(1)
    got = round_to_grid((steps * 2.0**-9).float(), TABLE["e4m3"], draws)
    assert_same(got, want * 2.0**-9)


def test_every_pattern_of_16_bits_makes_the_gaussian_of_equation_10() -> None:
    inputs = torch.arange(1 << 16)
    nibbles = gaussian_nibbles([inputs >> p & 1 for p in range(16)])
    values = unpack_noise(nibbles.to(torch.int32), 8 << 16).view(-1, 8)
    assert not values[:, 1:].any()
    counts = {v: int((values[:, 0] == v).sum()) for v in range(-8, 8)}
    assert {v: n for v, n in counts.items() if n} == {-2: 96, -1: 9189, 0: 46966, 1: 9189, 2: 96}


def test_gaussian_noise_packs_eight_elements_of_one_counter_to_a_word() -> None:
    count, seed = 8 * 50 + 3, 0xABCDEF0123
    packed = gaussian_noise(count, seed, "cpu")
    assert packed.dtype == torch.int32
    assert packed.shape == (51,)
    values = unpack_noise(packed, count)
    assert values.dtype == torch.int8
    assert values.shape == (count,)
    for element in (*range(16), 399, 402):
        four = scalar_philox((element // 8, 0, 2, 0), seed)
        p = [bool(four[k] >> (b + 4 * (element % 8)) & 1) for k in range(4) for b in range(4)]
        two = all(p[:8]) and (p[8] or p[9])
        one = (p[10] or p[11]) and (p[12] or p[13]) and p[14] and not two
        assert values[element] == (2 if two else 1 if one else 0) * (-1 if p[15] else 1)
    many = unpack_noise(gaussian_noise(1 << 20, 5, "cpu"), 1 << 20).double()
    assert many.mean().abs() < 4 * math.sqrt(0.292145 / 2**20)
    assert abs(many.var() - 0.292145) < 0.003


def test_uniform_noise_is_the_middle_of_one_of_65536_cells_in_bf16() -> None:
    noise = uniform_noise(1003, 7, "cpu")
    assert noise.dtype == torch.bfloat16
    for i in range(1003):
        word = scalar_philox((i // 8, 0, 2, 0), 7)[i // 2 % 4]
        h = word >> 16 * (i % 2) & 0xFFFF
        exact = Fraction(2 * h + 1, 1 << 17) - Fraction(1, 2)
        assert noise[i] == torch.tensor(float(exact), dtype=torch.float64).to(torch.bfloat16)


# Scales. Each row of one_block_per_row() is a block whose first element has the largest magnitude.


def float32_of(value: Fraction) -> float:
    """Return the float32 nearest to a positive fraction, ties to even; inf if the result would exceed FLT_MAX."""
    exponent = math.floor(math.log2(value.numerator)) - math.floor(math.log2(value.denominator))
    exponent -= value < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = round(value / step) * step
    return float(nearest) if nearest <= Fraction(FLT_MAX) else math.inf


def ulp_neighbours(value: float) -> list[float]:
    return [float(np.nextafter(np.float32(value), np.float32(to))) for to in (0, np.inf)] + [value]


@cache
def adversarial_amaxes() -> list[float]:
    """Return magnitudes of blocks for which scales are easily wrong, and random ones.

    They are powers of two and maxima of formats times powers of two, with the float32 numbers next to each, subnormal
    numbers, FLT_MAX, and zero.
    """
    powers = [2.0**e for e in (-149, -148, -140, -127, -126, -125, -60, -10, -1, 0, 1, 2, 8, 60, 120, 125, 126, 127)]
    edges = [m * 2.0**e for m in (3, 6, 7, 7.5, 28, 448, 57344) for e in (-140, -130, -9, 0, 1, 9, 100)]
    near = [v for centre in powers + edges for v in ulp_neighbours(centre)]
    random = wild(1, 300, seed=4, octaves=30).abs().flatten().tolist()
    return [v for v in [*near, *random, FLT_MAX, 2.0**-149 * 3, 0.0] if math.isfinite(v)]


def one_block_per_row(amaxes: list[float]) -> Tensor:
    amax = torch.tensor(amaxes)
    return torch.stack([amax, -amax / 3, torch.zeros_like(amax), amax * 0.75], dim=1)


def scalar_ideal(amax: float, grid: Format) -> float:
    if amax == 0:
        return 1.0
    return min(max(float32_of(Fraction(grid.max) / Fraction(amax)), 2.0**-126), FLT_MAX)


def two_part(value: float) -> tuple[Fraction, int]:
    """Return the mantissa m in [1, 2) and the exponent e of a positive normal float32 value m · 2^e, from its bits."""
    (pattern,) = struct.unpack("<I", struct.pack("<f", value))
    return 1 + Fraction(pattern & 0x7FFFFF, 1 << 23), (pattern >> 23 & 0xFF) - 127


FORMATS_WITH_SCALES = ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "bf16", "e1m1", "e8m21"]


@pytest.mark.parametrize("name", FORMATS_WITH_SCALES)
def test_amax_scale_is_one_rounded_division(name: str) -> None:
    grid, amaxes = Format.parse(name), adversarial_amaxes()
    _, codes, groups = coded(one_block_per_row(amaxes), Quantizer(grid, "channel", "amax"), -1, 0)
    want = torch.tensor([scalar_ideal(a, grid) for a in amaxes])
    assert_same(codes.view(torch.float32).flatten(), want)
    assert groups.numel() == 0


@pytest.mark.parametrize("name", FORMATS_WITH_SCALES)
def test_gam_scale_is_the_groups_mantissa_and_an_exponent_that_does_not_saturate(name: str) -> None:
    grid = Format.parse(name)
    for amaxes in (adversarial_amaxes(), [1.5 * 2.0**127, 1.125 * 2.0**127, 1.875 * 2.0**126, 0.0], [0.0, 0.0]):
        x = one_block_per_row(amaxes)
        mantissa, group_exponent = two_part(scalar_ideal(max(amaxes), grid))
        want_codes, want_scales = [], []
        for a in amaxes:
            m, e = two_part(scalar_ideal(a, grid))
            e = group_exponent if a == 0 else e - (m < mantissa)
            want_codes.append(e + 127)
            want_scales.append(mantissa * Fraction(2) ** e)
            assert want_scales[-1] >= Fraction(1, 1 << 126)
        q = Quantizer(grid, "channel", "gam")
        _, codes, groups = coded(x, q, -1, 0)
        assert codes.flatten().tolist() == want_codes
        assert groups.tolist() == [float(mantissa)]
        for a, s in zip(amaxes, want_scales, strict=True):
            assert s <= Fraction(scalar_ideal(a, grid)) or a == 0
        # The result y is an element's grid value divided by s, so it reveals whether s is exact.
        y = quantize(x, q, -1, 0)[0]
        for row, s in zip(range(len(amaxes)), want_scales, strict=True):
            v = [float32_of(abs(Fraction(e)) * s) if e else 0.0 for e in x[row].tolist()]
            grid_values = [grid.decode(grid.code_of(e)) for e in v]
            back = [min(float32_of(Fraction(g) / s), FLT_MAX) if g else 0.0 for g in grid_values]
            assert y[row].abs().tolist() == back


def test_gam_with_row_groups_is_gam_of_each_row_of_blocks() -> None:
    x = wild(12, 20, seed=5)
    q = Quantizer.parse("e4m3:4x5:gam:group=row")
    tensor_wide = Quantizer.parse("e4m3:4x5:gam")
    for axis in (-1, 0):
        bands = x.split(4) if axis == -1 else x.split(4, dim=1)
        want = torch.cat([quantize(band.contiguous(), tensor_wide, axis, 0)[0] for band in bands], 0 if axis else 1)
        assert_same(quantize(x, q, axis, 0)[0], want)
        assert encode(x, q, axis, 0)[2].shape == (len(bands),)


@pytest.mark.parametrize("name", FORMATS_WITH_SCALES)
@pytest.mark.parametrize("scaling", ["e8m0", "mx"])
def test_power_of_two_scales_are_floors_of_exact_logarithms(name: str, scaling: Any) -> None:
    grid, amaxes = Format.parse(name), adversarial_amaxes()
    q = Quantizer(grid, "channel", scaling)
    x = one_block_per_row(amaxes)
    _, codes, groups = coded(x, q, -1, 0)
    y = quantize(x, q, -1, 0)[0]
    assert groups.numel() == 0
    for row, (a, code) in enumerate(zip(amaxes, codes.flatten().tolist(), strict=True)):
        e = 0
        if a:
            e = (math.frexp(grid.max)[1] - 1) - (math.frexp(a)[1] - 1)
            if scaling == "e8m0":  # the largest power of two that cannot saturate
                assert Fraction(2) ** (e + 1) * Fraction(a) > Fraction(grid.max)
                while Fraction(2) ** e * Fraction(a) > Fraction(grid.max):
                    e -= 1
            e = min(max(e, -127), 127)
        assert code == 127 - e
        v = [float32_of(abs(Fraction(w)) * Fraction(2) ** e) if w else 0.0 for w in x[row].tolist()]
        want = [Fraction(grid.decode(grid.code_of(w))) / Fraction(2) ** e for w in v]
        assert y[row].abs().tolist() == [min(float32_of(w), FLT_MAX) if w else 0.0 for w in want]


def scalar_two_levels(
    rows: np.ndarray[Any, Any], grid: Format, scales: Format
) -> tuple[list[int], np.float32, list[list[float]]]:
    """Quantize blocks (rows) by two-level scales, one float32 operation at a time in TransformerEngine's order.

    Return the codes of the block scales, the tensor scale by which decoding multiplies, and the decoded rows.
    """
    f, top, flt_max = np.float32, np.float32(grid.max), np.float32(FLT_MAX)
    tensor_amax = np.abs(rows).max()
    g = f(1) if tensor_amax == 0 else min(top * f(448) / tensor_amax, flt_max)
    d = f(1) / g
    multiplier = g * (f(1) / top)
    codes, values = [], []
    for row in rows:
        code = scales.code_of(float(min(np.abs(row).max() * multiplier, f(scales.max))))
        s8 = f(scales.decode(code))
        s = min(f(1) / (s8 * d), flt_max)
        codes.append(code)
        restored = []
        for v in row:
            q = f(grid.decode(grid.code_of(float(v * s))))
            y = q * s8 * d
            restored.append(float(np.clip(y, -flt_max, flt_max)) if s8 else math.copysign(0.0, v))
        values.append(restored)
    return codes, d, values


@pytest.mark.parametrize("scaling", ["nvfp4", "ue5m3"])
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e2m3", "bf16"])
def test_two_levels_follow_transformer_engine_operation_by_operation(name: str, scaling: Any) -> None:
    grid, amaxes = TABLE[name], adversarial_amaxes()
    below = [sorted(a for a in amaxes if a <= limit) for limit in (FLT_MAX, 1e30, 2688.0, 1.0, 1e-30, 1e-40, 0.0)]
    for some in [*below, *([a] for a in amaxes[:: 3 if DEEP else 10])]:
        x = one_block_per_row(some)
        q = Quantizer(grid, "1x4", scaling)
        with np.errstate(all="ignore"):
            want_codes, want_d, want = scalar_two_levels(
                x.numpy(), grid, TABLE["e4m3" if scaling == "nvfp4" else scaling]
            )
        _, codes, groups = coded(x, q, -1, 0)
        assert codes.flatten().tolist() == want_codes
        assert groups.tolist() == [want_d]
        assert_same(quantize(x, q, -1, 0)[0], torch.tensor(want))


def ties_and_heavy_tails() -> Tensor:
    """Return a matrix whose rows are blocks of 16: 32 blocks with heavy tails, and one for each of 118 E4M3 scales.

    A block for an E4M3 scale has all midpoints between neighbours in E2M1, and 6 and 0, each times the scale.
    """
    heavy = torch.exp(3 * torch.randn(32, 16, generator=generator(11)))
    heavy *= torch.sign(torch.randn(32, 16, generator=generator(12)))
    d = 1 / (6 * 448 / heavy.abs().max())
    s8 = torch.tensor([TABLE["e4m3"].decode(code) for code in range(8, 126)])[:, None]
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    return torch.cat([heavy, torch.tensor([*halves, 6.0, 0.0, *(-h for h in halves)]) * (s8 * d)])


def test_ties_and_heavy_tails_follow_transformer_engine_where_another_order_would_not() -> None:
    grid, x, f = TABLE["e2m1"], ties_and_heavy_tails(), np.float32
    q = Quantizer(grid, "1x16", "nvfp4")
    want_codes, want_d, want = scalar_two_levels(x.numpy(), grid, TABLE["e4m3"])
    got = quantize(x, q, -1, 0)[0]
    assert_same(got, torch.tensor(want))
    _, codes, groups = coded(x, q, -1, 0)
    assert (codes.flatten().tolist(), groups.tolist()) == (want_codes, [want_d])
    s8 = torch.tensor([float(TABLE["e4m3"].decode(code)) for code in want_codes])[:, None]
    # The reference multiplies by a reciprocal instead of this division.
    divided = (x / (s8 * float(want_d))).nan_to_num(0, 0, 0).numpy()
    other = [
        [float(f(grid.decode(grid.code_of(float(v)))) * f(s) * want_d) for v in row]
        for row, s in zip(divided, s8.flatten().tolist(), strict=True)
    ]
    assert not torch.equal(torch.tensor(other), got), "the order of operations decides ties"


# Rotation


def hadamard_matrix(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix, divided by √size so that it is orthonormal, in float64.

    The element in row i and column j is negative if i & j has an odd number of 1 bits.
    """
    rows = [[(-1) ** (i & j).bit_count() / math.sqrt(size) for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("size", HADAMARD_SIZES)
@pytest.mark.parametrize("length", [128, 1, 5, 93, 300])
def test_rotation_is_the_matrix_of_signs_and_hadamard(size: int, length: int) -> None:
    q = Quantizer(hadamard=size, signs=12345)
    signs = hadamard_signs(q, torch.device("cpu")).double()
    blocks, left = [size] * (length // size), length % size
    blocks += [1 << k for k in reversed(range(7)) if left >> k & 1]
    matrix = torch.block_diag(*(hadamard_matrix(n) for n in blocks))
    in_chunk = torch.arange(length) % size
    matrix = signs[in_chunk][:, None] * matrix
    x = torch.randn(6, length, generator=generator(size))
    for axis in (-1, 0):
        own = x if axis == -1 else x.t().contiguous()
        got, back = (r if axis == -1 else r.t() for r in (rotate(own, q, axis), rotate(own, q, axis, inverse=True)))
        torch.testing.assert_close(got.double(), x.double() @ matrix, rtol=0, atol=3e-6)
        torch.testing.assert_close(back.double(), x.double() @ matrix.t(), rtol=0, atol=3e-6)
    a, b = (torch.randn(4, length, generator=generator(s)) for s in (1, 2))
    torch.testing.assert_close(rotate(a, q, -1) @ rotate(b, q, -1).t(), a @ b.t(), rtol=0, atol=2e-4)


def test_rotation_rounds_once_per_operation_and_then_to_the_dtype() -> None:
    """Check a rotation of size 2^3 against scalar FP32 code, in this order of operations.

    Multiply by signs and by 2^-1 (in general 2^-floor(k/2) for size 2^k), add and subtract elements at distances 1, 2
    and 4, and multiply by √½, because k is odd.
    """
    f = np.float32
    x = wild(1, 8, seed=8, octaves=8)
    signs = hadamard_signs(Quantizer(hadamard=8, signs=3), torch.device("cpu")).numpy()
    v = [f(a * s * f(0.5)) for a, s in zip(x[0].numpy(), signs, strict=False)]
    for distance in (1, 2, 4):
        for i in (i for i in range(8) if not i & distance):
            v[i], v[i + distance] = v[i] + v[i + distance], v[i] - v[i + distance]
    want = torch.tensor([a * f(math.sqrt(0.5)) for a in v])
    q = Quantizer(hadamard=8, signs=3)
    assert_same(rotate(x, q, -1)[0], want)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype).clamp(-1000, 1000)
        assert_same(rotate(narrow, q, -1), rotate(narrow.float(), q, -1).to(dtype))


def test_signs_are_te_or_none_or_bits_of_philox() -> None:
    cpu = torch.device("cpu")
    te = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert hadamard_signs(Quantizer(hadamard=16), cpu).tolist() == te
    assert (hadamard_signs(Quantizer(hadamard=4, signs="none"), cpu) == 1).all()
    seed = 0x1234_5678_9ABC
    four = scalar_philox((0, 0, 3, 0), seed)
    want = [1 - 2 * (four[i // 32] >> i % 32 & 1) for i in range(128)]
    assert hadamard_signs(Quantizer(hadamard=32, signs=seed), cpu).tolist() == want


def test_quantizing_with_rotation_is_quantizing_what_was_rotated() -> None:
    for dtype in DTYPES:
        x = wild(24, 40, seed=9, octaves=2).to(dtype)
        for text in ("e4m3:1x16:gam:rht16", "e2m1:1x16:nvfp4:stochastic:rht32"):
            q = Quantizer.parse(text)
            plain = Quantizer(q.format, q.block, q.scaling, q.rounding)
            for axis in (-1, 0):
                assert_same(quantize(x, q, axis, 4)[0], quantize(rotate(x, q, axis), plain, axis, 4)[0])


# Whole matrices


@pytest.mark.parametrize(
    "text",
    [
        "e2m1:1x4:nvfp4",
        "e5m2:1x4:nvfp4:overflow=inf",
        "e4m3:1x4:nvfp4:overflow=nan",
    ],
)
def test_decoding_keeps_the_signs_of_an_nvfp4_block_with_scale_0(text: str) -> None:
    q = Quantizer.parse(text)
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1e-10, -1e-10, 0.0, -0.0]])
    y = quantize(x, q, -1, 0)[0]
    assert_same(y[0, 4:], torch.tensor([0.0, -0.0, 0.0, -0.0]))
    assert_same(decode(*encode(x, q, -1, 0), q, -1, x.shape[1], x.dtype), y)


@pytest.mark.parametrize("text", QUANTIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_in_finite_out(text: str, dtype: torch.dtype) -> None:
    q = Quantizer.parse(text)
    x = (wild(20, 32, seed=13, octaves=40).clamp(-FLT_MAX, FLT_MAX) * (0.01 if q.hadamard else 1)).to(dtype)
    info = torch.finfo(dtype)
    x = x.clamp(info.min * (0.01 if q.hadamard else 1), info.max * (0.01 if q.hadamard else 1))
    x[0, :2] = torch.tensor([info.smallest_normal, -info.smallest_normal / 2], dtype=dtype)
    y = quantize(x, q, -1, 14)[0]
    assert y.isfinite().all() or q.overflow != "saturate"
    assert not (y.isinf().any() and q.overflow != "inf")


@pytest.mark.parametrize("text", [t for t in QUANTIZERS if Quantizer.parse(t).scaling != "none" and "rht" not in t])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_non_finite_value_is_nan_and_no_other_block_notices(text: str, poison: float) -> None:
    q = Quantizer.parse(text)
    x = wild(20, 40, seed=15, octaves=2)
    for axis in (-1, 0):
        r, c = q.block.resolve((20, 40), axis)
        block = (slice(9 // r * r, 9 // r * r + r), slice(17 // c * c, 17 // c * c + c))
        poisoned, zeroed = x.clone(), x.clone()
        poisoned[9, 17], zeroed[block] = poison, 0.0
        y, want = quantize(poisoned, q, axis, 16)[0], quantize(zeroed, q, axis, 16)[0]
        want[block] = math.nan
        assert_same(y, want)
        codes, scale_codes, _ = coded(poisoned, q, axis, 16)
        assert not codes[block].any()
        nan = {"amax": 0x7FC00000, "nvfp4": 0x7F, "fouroversix": 0x7F}.get(q.scaling, 0xFF)
        assert (scale_codes == nan).sum() == 1
        assert scale_codes[9 // r, 17 // c] == nan


def test_a_rotation_beyond_the_dtype_poisons_its_block() -> None:
    x = torch.ones(1, 32)
    x[0, :16] = FLT_MAX
    y = cast(x, "e4m3:1x16:gam:rht16:signs=none")
    assert y[0, :16].isnan().all()
    assert y[0, 16:].isfinite().all()


# Statistics


def scalar_counts(source: list[float], y: list[float], overflowed: list[bool]) -> list[int]:
    f = np.float32
    counts = [0] * 7
    for x, value, over in zip(map(f, source), map(f, y), overflowed, strict=True):
        counts[5] += not np.isfinite(x)
        counts[6] += not np.isfinite(value)
        if x == 0:
            continue
        error = abs(x - value) / abs(x)
        counts[1] += 1
        counts[2] += bool(value == 0)
        counts[3] += bool(over and value != 0)
        counts[4] += bool(error > 1)
        one_and_error = f(1) + (f(1) if np.isnan(error) else min(error, f(1)))
        counts[0] += int((float(one_and_error) - 1) * 2**23)
    return counts


@pytest.mark.parametrize(
    "text", ["e4m3", "e4m3:overflow=nan", "e5m2:overflow=inf", "e2m1:stochastic", "e4m3:1x16:e8m0", "e2m1:1x8:mx:rht4"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_count_what_a_scalar_loop_counts(text: str, dtype: torch.dtype) -> None:
    q = Quantizer.parse(text)
    x = wild(21, 34, seed=17, octaves=6).to(dtype)
    x[3, 4], x[11, 30] = math.nan, -math.inf
    for axis, (r, c) in product((-1, 0), ((8, 16), (21, 34), (1, 50), (1000, 3))):
        y, counts, amax = quantize(x, q, axis, 18, want_stats=True, partition=(r, c))
        assert counts is not None
        assert amax is not None
        assert counts.dtype == torch.int64
        source = rotate(x, q, axis).float()
        scaled = source
        if q.scaling != "none":
            _, scale_codes, _ = coded(x, q, axis, 18)
            br, bc = q.block.resolve((21, 34), axis)
            exponent = (127 - scale_codes).repeat_interleave(br, 0)[:21].repeat_interleave(bc, 1)[:, :34]
            scaled = torch.where(exponent == -128, math.nan, source * torch.exp2(exponent.double()).float())
        limit = q.format.max + math.ldexp(1.0, q.format.emax - q.format.mantissa_bits - 1)
        ties = q.format.max_code % 2 == 1
        over = (scaled.abs() > limit) | (scaled.abs() == limit) & ties
        if q.rounding == "stochastic":  # e2m1: a value between 6 and 8 has overflowed if it is rounded to 8
            draws = uniform(x.numel(), 18, "cpu").view(x.shape)
            beyond = scaled.abs().double()
            over = (beyond >= 8) | (beyond > 6) & torch.where(
                beyond <= 7, draws < (beyond - 6) / 2, draws >= (8 - beyond) / 2
            )
        over &= source.isfinite()
        for i, j in product(range(counts.shape[0]), range(counts.shape[1])):
            here = (slice(i * r, (i + 1) * r), slice(j * c, (j + 1) * c))
            with np.errstate(all="ignore"):
                want = scalar_counts(
                    source[here].flatten().tolist(), y.float()[here].flatten().tolist(), over[here].flatten().tolist()
                )
            assert counts[i, j].tolist() == want
            if source[here].isfinite().all():
                assert amax[i, j] == source[here].abs().max()
            else:
                assert not amax[i, j].isfinite()
    whole = quantize(x, q, -1, 18, want_stats=True)[1]
    assert whole is not None
    assert torch.equal(whole, quantize(x, q, -1, 18, want_stats=True, partition=(21, 34))[1])


def test_what_a_zero_scale_flushes_is_not_saturated() -> None:
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1e-10, -1e-10, 0.0, -0.0]])
    _, counts, _ = quantize(x, Quantizer.parse("e2m1:1x4:nvfp4"), -1, 0, want_stats=True, partition=(1, 4))
    assert counts is not None
    assert counts.tolist() == [[[0, 4, 0, 0, 0, 0, 0], [2 << 23, 2, 2, 0, 0, 0, 0]]]


def test_skipped_parts_are_left_alone_and_count_for_nothing() -> None:
    q = Quantizer.parse("e4m3:8x8:gam")
    x = wild(20, 20, seed=19)
    skip = torch.rand(3, 3, generator=generator(20)) < 0.5
    untouched = skip.repeat_interleave(8, 0)[:20].repeat_interleave(8, 1)[:, :20]
    plain, all_counts, all_amax = quantize(x, q, -1, 0, want_stats=True, partition=(8, 8))
    assert all_counts is not None
    assert all_amax is not None
    out = torch.full_like(x, 7.0)
    y, counts, amax = quantize(x, q, -1, 0, out=out, want_stats=True, partition=(8, 8), skip=skip)
    assert y is out
    assert_same(out, torch.where(untouched, torch.full_like(x, 7.0), plain))
    assert torch.equal(counts, torch.where(skip[..., None], 0, all_counts))
    assert torch.equal(amax, torch.where(skip, 0, all_amax))


def test_extent_is_the_largest_and_the_smallest_non_zero_magnitude() -> None:
    for dtype in DTYPES:
        x = wild(10, 14, seed=22, octaves=3).to(dtype)
        x[:4, :5] = -0.0
        x[9, 13] = math.nan
        top, low = extent(x, (4, 5))
        assert top.shape == low.shape == (3, 3)
        for i, j in product(range(3), range(3)):
            part = x[4 * i : 4 * i + 4, 5 * j : 5 * j + 5].float().abs()
            finite = part[part > 0]
            assert low[i, j] == (finite.min() if finite.numel() else math.inf)
            assert (not top[i, j].isfinite()) if (i, j) == (2, 2) else top[i, j] == part.max()


# Sampled weights


def test_powers_are_those_of_exact_arithmetic_rounded_once() -> None:
    t = torch.cat(
        [torch.arange(-149, 128).double(), torch.empty(300_000).uniform_(-140, 126, generator=generator(24)).double()]
    )
    exact = np.exp2(t.numpy().astype(np.longdouble)).astype(np.float32)  # computed with 64 bits, and rounded once
    assert np.array_equal(exp2(t).numpy(), exact)
    assert exp2(torch.tensor([-1e4, 1e4, math.nan], dtype=torch.float64))[:2].tolist() == [0.0, math.inf]


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sampled_weight_is_the_weight_and_scaled_noise(noise: Any, dtype: torch.dtype) -> None:
    w = torch.randn(70, 45, generator=generator(25)).to(dtype)
    b = torch.empty(3, 2).uniform_(2, 9, generator=generator(26))
    count = w.numel()
    r = uniform_noise(count, 3, "cpu") if noise == "uniform" else unpack_noise(gaussian_noise(count, 3, "cpu"), count)
    r = r.float().view(70, 45)
    f = np.float32
    want = torch.empty(70, 45)
    for i, j in product(range(70), range(45)):
        square = w[i // 32 * 32 :][:32, j // 32 * 32 :][:, :32].float()
        power = f(np.exp2(np.longdouble(1) - np.longdouble(b[i // 32, j // 32].item())))
        s = power * f(square.abs().max().item())
        want[i, j] = float(f(w[i, j].item()) + f(r[i, j].item()) * s)
    for result in (torch.bfloat16, torch.float32):
        assert_same(sample_weight(w, b, 3, noise, 32, result), want.to(result))


def test_the_gradient_of_bits_is_summed_in_the_written_order() -> None:
    w, grad = (torch.randn(20, 27, generator=generator(s)) for s in (30, 31))
    b = torch.tensor([[4.0]])
    f = np.float32
    r = uniform_noise(w.numel(), 1, "cpu").float().view(w.shape).numpy()
    column = [f(0)] * 32
    for j in range(27):
        for i in range(20):
            column[j] = column[j] + f(grad[i, j].item()) * r[i, j]
    for half in (16, 8, 4, 2, 1):
        for c in range(half):
            column[c] = column[c] + column[c + half]
    s = f(0.125) * f(w.abs().max().item())
    want = f(-math.log(2)) * s * column[0]
    assert sample_weight_backward(grad, w, b, 1, "uniform", 32).item() == want
