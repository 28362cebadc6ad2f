"""Check products whose sums are rounded as in some hardware, for example in Hopper's FP8 tensor cores.

The reference implementation is compared with sums in exact fractions, and the compiled kernels with the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import Tensor

from fewbits import fake_quantize, product
from fewbits.kernels import accumulators
from fewbits.kernels.accumulators import ACCUMULATORS, GROUP, Accumulator
from fewbits.kernels.formats import TABLE, Format
from tests.effort import DEEP

FP8 = torch.float8_e4m3fn
DTYPES = {FP8: "e4m3", torch.float8_e5m2: "e5m2", torch.bfloat16: "bf16", torch.float16: "fp16"}
FUSED = [name for name, row in ACCUMULATORS.items() if row.kind == "fused"]
FORMATS = [name for name, row in ACCUMULATORS.items() if row.kind == "format"]
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 200) if DEEP else (1, 33, 129)
E2M1 = torch.tensor(TABLE["e2m1"].values())


def _reference(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Tensor]) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(accumulators, "_is_compiled_for", lambda x: False)
        return run()


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def _operands(dtype: torch.dtype, k: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of operands [3, k] and [k, 21]: normal numbers, and inputs that reveal wrong implementations."""
    torch.manual_seed(seed)
    a, b = torch.randn(3, k), torch.randn(k, 21)
    grid = torch.tensor([v for v in TABLE[DTYPES[dtype]].values() if math.isfinite(v)])
    patterns = lambda *shape: grid[torch.randint(len(grid), shape)]  # noqa: E731
    tiny = TABLE[DTYPES[dtype]].min_subnormal
    pairs = [
        (a, b),
        (a.abs(), torch.rand(k, 21)),
        (patterns(3, k), patterns(k, 21)),
        (tiny * torch.randint(-9, 10, (3, k)), tiny * torch.randint(-9, 10, (k, 21))),
        (torch.ones(3, k), b * (-1.0) ** torch.arange(k)[:, None]),
        (a, torch.cat([b[: k // 2], -b[: k - k // 2]])),
        (torch.zeros(3, k), patterns(k, 21)),
        (a * 2.0 ** torch.randint(-8, 7, (3, k)), b * 2.0 ** torch.randint(-8, 7, (k, 21))),
    ]
    return [(x.to(dtype), y.to(dtype)) for x, y in pairs]


def _with_specials(x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    wide = x.float()
    marks = torch.rand(wide.shape)
    wide[marks < 0.02] = math.nan
    if x.dtype != FP8:
        wide[marks > 0.97] = math.inf
        wide[marks > 0.985] = -math.inf
    return wide.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("name", [*FUSED, *FORMATS])
def test_compiled_sums_have_the_bits_of_the_reference(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check finite operands, and the same operands with NaN and infinities in the left or in the right one.

    Without FEWBITS_TESTS=deep, each pair of operands gets NaN and infinities on only one of the two sides.
    """
    for k in LENGTHS:
        for i, (a, b) in enumerate(_operands(dtype, k, k)):
            special = ((_with_specials(a, i), b), (a, _with_specials(b, i)))
            for x, y in ((a, b), *(special if DEEP else special[(LENGTHS.index(k) + i) % 2 :][:1])):
                ours = product(x, y, name)
                assert _same(ours, _reference(monkeypatch, partial(product, x, y, name))), (k, i)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("scale", [FP8, torch.float8_e8m0fnu, None])
def test_compiled_sums_of_groups_have_the_bits_of_the_reference(
    scale: torch.dtype | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in (1, 16, 33, 64, 100, 192):
        torch.manual_seed(k)
        a, b = E2M1[torch.randint(16, (3, k))], E2M1[torch.randint(16, (k, 21))]
        scales = None
        if scale is not None:
            count = -(-k // block)
            bits = [torch.randint(255 if scale != FP8 else 127, shape) for shape in ((3, count), (count, 21))]
            scales = bits[0].to(torch.uint8).view(scale), bits[1].to(torch.uint8).view(scale)
        run = lambda a=a, b=b, s=scales: product(a, b, "blackwell-fp4", scales=s)  # noqa: E731
        assert _same(run(), _reference(monkeypatch, run)), k


# An independent implementation in exact fractions, written from arithmetic.md


def _exponent(v: Fraction, emin: int) -> int:
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return max(e if abs(v) >= Fraction(2) ** e else e - 1, emin)


def _fused(a: list[float], b: list[float], emin: int, row: Accumulator) -> float:
    """Return Σ a·b as the fused accumulator `row` computes it, from exact fractions; inf if a sum exceeds float32.

    emin: the smallest exponent of a normal number in the operands' format.
    """
    c = outside = Fraction(0)
    for start in range(0, len(a), row.length):
        pairs = zip(a[start : start + row.length], b[start : start + row.length], strict=True)
        terms = [
            (Fraction(x) * Fraction(y), _exponent(Fraction(x), emin) + _exponent(Fraction(y), emin))
            for x, y in pairs
            if x and y
        ]
        c = _aligned([*terms, (c, _exponent(c, -126))] if c else terms, row)
        if abs(c) >= Fraction(2) ** 128:
            return math.inf
        if row.promote and (start + row.length) % row.promote == 0:
            outside, c = _to_fp32(outside + c), Fraction(0)
    return float(_to_fp32(outside + c) if row.promote else c)


def _aligned(terms: list[tuple[Fraction, int]], row: Accumulator) -> Fraction:
    top = max([-126, *(e for _, e in terms)])
    unit = Fraction(2) ** (top - row.fraction)
    total = sum((math.trunc(v / unit) for v, _ in terms), 0) * unit
    if not total:
        return Fraction(0)
    last = Fraction(2) ** (_exponent(total, -126) - row.kept_bits)
    return math.trunc(total / last) * last


def _to_fp32(v: Fraction) -> Fraction:
    return Fraction(float(torch.tensor(float(v), dtype=torch.float32))) if v else v


@pytest.mark.parametrize("name", FUSED)
def test_sums_are_those_of_exact_fractions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ACCUMULATORS[name]
    for k in (1, 31, 33, 130):
        for dtype, grid in DTYPES.items():
            for a, b in _operands(dtype, k, k + 1):
                ours = _reference(monkeypatch, partial(product, a[:2], b[:, :2], name))
                for i in range(2):
                    exact = _fused(a[i].tolist(), b[:, i].tolist(), TABLE[grid].emin, row)
                    if math.isinf(exact):
                        assert not math.isfinite(ours[i, i]), (k, dtype, i)
                    else:
                        assert float(ours[i, i]) == exact, (k, dtype, i)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sums_in_a_format_round_each_addition_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = TABLE[name]
    for k in (1, 7, 50):
        for dtype in (torch.float16, torch.bfloat16):
            for a, b in _operands(dtype, k, k):
                ours = _reference(monkeypatch, partial(product, a[:1], b[:, :3], name))
                for j in range(3):
                    exact = _sequential((a[0].float() * b[:, j].float()).tolist(), f)
                    assert float(ours[0, j]) == exact or (math.isnan(ours[0, j]) and math.isnan(exact))


def _sequential(products: list[float], f: Format) -> float:
    c = 0.0
    for p in products:
        if not math.isfinite(c + p):
            c = c + p
            continue
        v = Fraction(c) + Fraction(p)
        step = Fraction(2) ** (_exponent(v, f.emin) - f.mantissa_bits) if v else Fraction(1)
        rounded = round(v / step) * step
        c = float(rounded) if abs(rounded) <= Fraction(f.max) else math.copysign(math.inf, rounded)
    return c


def test_groups_are_exact_within_and_aligned_by_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ACCUMULATORS["blackwell-fp4"]
    torch.manual_seed(0)
    a, b = E2M1[torch.randint(16, (1, 128))], E2M1[torch.randint(16, (128, 1))]
    scales = (2.0 ** torch.randint(-6, 7, (1, 8))).to(FP8), (torch.rand(8, 1) * 9).to(FP8)
    c = Fraction(0)
    for start in range(0, 8, row.length // GROUP):
        terms = [(c, _exponent(c, -126))] if c else []
        for g in range(start, start + row.length // GROUP):
            left, right = float(scales[0][0, g]), float(scales[1][g, 0])
            span = slice(g * GROUP, (g + 1) * GROUP)
            inside = sum(
                Fraction(x) * Fraction(y) for x, y in zip(a[0, span].tolist(), b[span, 0].tolist(), strict=True)
            )
            exponent = _exponent(Fraction(left), -6) + _exponent(Fraction(right), -6)
            if inside:
                terms.append((inside * Fraction(left) * Fraction(right), exponent))
        c = _aligned(terms, row)
    assert float(product(a, b, "blackwell-fp4", scales=scales)) == float(c)
    assert float(_reference(monkeypatch, lambda: product(a, b, "blackwell-fp4", scales=scales))) == float(c)


def test_hopper_drops_what_is_below_13_bits_of_the_largest_product() -> None:
    """Check 2^14 + 31 · 1, all added at once: Hopper truncates each 1 to zero before the sum, Blackwell does not."""
    a = torch.ones(1, 32)
    a[0, 0] = 2.0**7
    b = torch.ones(32, 1)
    b[0, 0] = 2.0**7
    assert float(product(a.to(FP8), b.to(FP8), "hopper-fp8")) == 2.0**14
    assert float(product(a.to(FP8), b.to(FP8), "blackwell-fp8")) == 2.0**14 + 31


def test_an_fp16_sum_of_ones_stops_at_2048() -> None:
    ones = torch.ones(1, 4096, dtype=torch.float16)
    assert float(product(ones, ones.T, "fp16")) == 2048
    assert float(product(ones, ones.T, "fp32")) == 4096


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 256).to(FP8), torch.randn(256, 70).to(FP8)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(product(a, b, "hopper-fp8"))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_empty_operands_give_zeros(name: str) -> None:
    dtype = torch.int8 if name == "int32" else torch.bfloat16
    a, b = torch.zeros(2, 0, dtype=dtype), torch.zeros(0, 3, dtype=dtype)
    assert torch.equal(product(a, b, name), torch.zeros(2, 3))
    assert product(a[:0], b, name).shape == (0, 3)


def test_integers_are_summed_in_32_bits_and_then_scaled() -> None:
    """Check INT8 × INT8 → INT32 → scales against torch's integer product and the product of quantized operands."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 300), torch.randn(300, 7)
    of_x, of_w = x.abs().amax(1, keepdim=True) / 127, w.abs().amax(0, keepdim=True) / 127
    a, b = (x / of_x).round().to(torch.int8), (w / of_w).round().to(torch.int8)
    sums = product(a, b, "int32")
    assert torch.equal(sums, (a.int() @ b.int()).float())
    assert torch.equal(product(a, b, "int32", scales=(of_x, of_w)), sums * of_x * of_w)
    quantized = fake_quantize(x, "int8:channel:amax"), fake_quantize(w, "int8:channel:amax", axis=0)
    torch.testing.assert_close(sums * of_x * of_w, quantized[0] @ quantized[1], rtol=1e-4, atol=1e-4)


def test_an_integer_sum_beyond_32_bits_wraps() -> None:
    a, b = torch.full((1, 140_000), 127, dtype=torch.int8), torch.full((140_000, 1), 127, dtype=torch.int8)
    assert product(a, b, "int32").item() == torch.tensor(140_000 * 127 * 127 - 2**32).float()


def test_wrong_operands_are_named() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"int8.*float32"):
        product(x, x, "int32")
    with pytest.raises(ValueError, match=r"\[3\].*\[2, 1\]"):
        product(x.to(torch.int8), x.to(torch.int8), "int32", scales=(torch.ones(3), torch.ones(1)))
    with pytest.raises(ValueError, match=r"hopper-fp9.*hopper-fp8"):
        product(x, x, "hopper-fp9")
    with pytest.raises(ValueError, match=r"float32.*float8_e4m3fn"):
        product(x, x, "hopper-fp8")
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[3, 2\]"):
        product(x, torch.ones(3, 2), "fp32")
    with pytest.raises(ValueError, match=r"cpu.*meta"):
        product(x, x.to("meta"), "fp32")
    with pytest.raises(ValueError, match="E2M1"):
        product(x * 5, x, "blackwell-fp4")
    with pytest.raises(ValueError, match=r"\[2, 3\].*16 or 32"):
        product(x, x, "blackwell-fp4", scales=(torch.ones(2, 3).to(FP8), torch.ones(1, 2).to(FP8)))
    with pytest.raises(ValueError, match="blackwell-fp4"):
        product(x.half(), x.half(), "fp16", scales=(x, x))


def test_published_constants() -> None:
    """Check the numbers in ACCUMULATORS against publications, because the other tests take their numbers from it."""
    stated = {name: (one.length, one.fraction, one.promote) for name, one in ACCUMULATORS.items()}
    assert stated["hopper-fp8"] == (32, 13, 0)
    assert stated["hopper-fp8-promoted"] == (32, 13, 128)
