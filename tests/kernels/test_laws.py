"""Check laws that hold for every quantizer and all numbers, on adversarial inputs, through the public functions."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fewbits import Format, Quantizer, encode, fake_quantize
from fewbits.kernels import scalings
from tests.effort import DEEP, examples
from tests.kernels.inputs import DTYPES, FINITE, KINDS, ODD, assert_same, make

ELEMENTS = ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4")
SCALINGS = tuple(name for name, row in scalings.SCALINGS.items() if row.stored and not row.formats)  # for all formats
SQUARE = ("16x16", "32x32", "64x64", "128x128", "tensor")
ULP = 2.0**-23

blocks = st.sampled_from([*SQUARE, "channel", "1x128", "1x32", "1x16", "1x1", "3x5", "17x40"])
elements = st.sampled_from([*ELEMENTS, "bf16", "fp16"])
shapes = st.tuples(st.integers(1, 70), st.integers(1, 140))


@st.composite
def finite(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    name, dtype = draw(st.sampled_from(FINITE)), draw(st.sampled_from(dtypes))
    return make(name, draw(shapes), dtype, draw(st.integers(0, 2**32)))


def block_of(x: Tensor, block: str) -> tuple[int, int]:
    return Quantizer("e4m3", block, "amax").block.resolve(x.shape)


def amax_of(x: Tensor, block: str) -> Tensor:
    """Return the largest magnitude of each block in float64, computed by a loop over the blocks."""
    r, c = block_of(x, block)
    return torch.tensor([[float(b.abs().max()) for b in band.split(c, 1)] for band in x.split(r)], dtype=torch.float64)


# Scales


@pytest.mark.parametrize("scaling", ["amax", "gam", "e8m0"])
@examples(400)
@given(finite(), elements, blocks)
def test_these_scalings_saturate_nothing(scaling: str, x: Tensor, element: str, block: str) -> None:
    """Check that rounding to nearest saturates nothing with the scalings amax, gam and e8m0.

    The product of a block's largest value and its scale may be one ulp too large, but even then it is rounded to the
    format's largest value.
    """
    values, stats = fake_quantize(x, f"{element}:{block}:{scaling}", stats=True)
    assert int(stats.saturated) == 0
    assert values.isfinite().all()


@examples(400)
@given(finite(), elements, blocks, st.integers(0, 2**63 - 1))
def test_e8m0_saturates_nothing_when_rounding_stochastically(x: Tensor, element: str, block: str, seed: int) -> None:
    """Check that stochastic rounding saturates nothing if scales are powers of two.

    Products with powers of two are exact, so scaled values are within the format's range. So are the two neighbouring
    values of the format, to one of which a scaled value is rounded.
    """
    _, stats = fake_quantize(x, f"{element}:{block}:e8m0:stochastic", seed=seed, stats=True)
    assert int(stats.saturated) == 0


@examples(400)
@given(finite(), st.sampled_from(ELEMENTS), blocks, st.sampled_from(["", ":group=row"]))
def test_gam_uses_more_than_half_of_the_range_and_all_of_it_where_the_groups_largest_is(
    x: Tensor, element: str, block: str, group: str
) -> None:
    """Check MoR's algorithm 1: a block's amax times its scale is in (max / 2, max], up to one ulp.

    max is the format's largest value; the ulp is from the rounding of a division. The largest value of each group (the
    blocks that share a mantissa) keeps its magnitude. Tensors are excluded if max / amax of a block is 2^127 or more:
    float32's range limits the scale of such a block, so the block uses less of the format's range.
    """
    packed, top = encode(x, f"{element}:{block}:gam{group}"), Format.parse(element).max
    amax = amax_of(x, block)
    assume(bool(((amax == 0) | (amax > top * 2.0**-127)).all()))
    assert packed.scales is not None
    assert packed.group_scales is not None
    scale = packed.group_scales.double()[:, None] * torch.exp2(packed.scales.double() - 127)
    use = (amax * scale / top)[amax > 0]
    assert ((use > 0.5 * (1 - ULP)) & (use <= 1 + ULP)).all()
    values = fake_quantize(x.float(), packed.quantizer).double()
    rows = block_of(x, block)[0] if group else len(x)
    for before, after in zip(x.split(rows), values.split(rows), strict=True):
        assert math.isclose(float(after.abs().max()), float(before.abs().max()), rel_tol=ULP)


@pytest.mark.parametrize("text", ["e4m3", *(f"{f}:16x16:{s}" for f in ELEMENTS for s in SCALINGS)])
def test_zeros_stay_zeros_with_their_signs(text: str) -> None:
    for name, dtype, rounding in product(("zeros", "negative zeros"), DTYPES, ("", ":stochastic")):
        x = make(name, (33, 40), dtype)
        values, stats = fake_quantize(x, text + rounding, seed=1, stats=True)
        assert_same(values, x, f"{text} {name}")
        assert not stats.counts.any()
        assert float(stats.error) == 0


@examples(400)
@given(finite(), elements, st.sampled_from(SCALINGS))
def test_a_block_of_zeros_stays_zero_beside_others(x: Tensor, element: str, scaling: str) -> None:
    x[:16, :16] = 0
    assert_same(fake_quantize(x, f"{element}:16x16:{scaling}")[:16, :16], x[:16, :16])


# Axes


@pytest.mark.parametrize("scaling", SCALINGS)
@examples(100)
@given(finite(), elements, st.sampled_from(SQUARE))
def test_square_blocks_commute_with_transposition(scaling: str, x: Tensor, element: str, block: str) -> None:
    q = f"{element}:{block}:{scaling}"
    assert_same(fake_quantize(x.t(), q), fake_quantize(x, q).t(), q)


@examples(400)
@given(finite(), elements, blocks, st.sampled_from(SCALINGS))
def test_axis_0_is_the_last_axis_of_the_transpose(x: Tensor, element: str, block: str, scaling: str) -> None:
    q = f"{element}:{block}:{scaling}"
    assert_same(fake_quantize(x, q, axis=0), fake_quantize(x.t(), q).t(), q)


# Rounding


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@examples(100)
@given(finite(), elements, blocks, st.sampled_from(["none", "e8m0", "mx"]))
def test_quantizing_again_changes_nothing(rounding: str, x: Tensor, element: str, block: str, scaling: str) -> None:
    """Check idempotence for naive casts and scales that are powers of two.

    A result is on the grid of its scale, and so also on the grid of every smaller power of two. Idempotence need not
    hold in three other cases. With nvfp4, rounding changes a block's largest value, so the E4M3 scale may be rounded
    differently the next time. With a rotation, the second quantization rotates again. A value that
    rounds beyond the dtype's largest value becomes this largest value, which may not be on the grid; to avoid this
    case, the test halves x.
    """
    x = x / 2
    q = f"{element}:{rounding}" if scaling == "none" else f"{element}:{block}:{scaling}:{rounding}"
    once = fake_quantize(x, q, seed=1)
    assert_same(fake_quantize(once, q, seed=2), once, q)


@examples(400)
@given(finite((torch.bfloat16, torch.float32)), st.sampled_from(ELEMENTS), blocks, st.sampled_from(["amax", "gam"]))
def test_quantizing_again_changes_nothing_with_scales_that_are_quotients(
    x: Tensor, element: str, block: str, scaling: str
) -> None:
    """Check that with the scalings amax and gam, quantizing a result again does not change it.

    Let a be a block's amax and max the format's largest value. In float32, max / (max / a) may differ from a, but
    max / (max / (max / a)) = max / a, so the scale stays the same. This need not hold in fp16: a result that is
    subnormal in fp16 is rounded again, which may change amax and gam's exponent.
    """
    q = f"{element}:{block}:{scaling}"
    once = fake_quantize(x, q)
    assert_same(fake_quantize(once, q), once, q)


@examples(400)
@given(finite(), elements, st.sampled_from(["none", *SCALINGS]))
def test_rounding_to_nearest_keeps_the_order_within_a_block(x: Tensor, element: str, scaling: str) -> None:
    rows = x.float().sort(dim=1).values.to(x.dtype)
    q = element if scaling == "none" else f"{element}:channel:{scaling}"
    y = fake_quantize(rows, q).double()
    assert (y.diff(dim=1) >= 0).all(), q


@examples(100)
@given(
    finite(),
    elements,
    st.sampled_from(["none", *SCALINGS]),
    st.sampled_from(["", ":stochastic"]),
)
def test_negation_commutes_with_quantization(x: Tensor, element: str, scaling: str, rounding: str) -> None:
    q = f"{element}{rounding}" if scaling == "none" else f"{element}:1x16:{scaling}{rounding}"
    assert_same(fake_quantize(-x, q, seed=5), -fake_quantize(x, q, seed=5), q)


@pytest.mark.parametrize(
    "text", ["e4m3:1x16:amax", "e4m3:16x16:gam", "e2m1:1x32:e8m0", "e2m1:1x32:mx", "e2m1:1x16:nvfp4"]
)
@pytest.mark.parametrize("name", KINDS)
def test_statistics_do_not_depend_on_how_they_are_cut(text: str, name: str) -> None:
    """Check that a tensor's counts are the sums of its blocks' counts, and that `stats` does not change the values.

    Without FEWBITS_TESTS=deep, each input and shape is checked with one dtype.
    """
    for i, (shape, dtype) in enumerate(product(ODD, DTYPES)):
        if not DEEP and (i // len(DTYPES) + i + list(KINDS).index(name)) % len(DTYPES):
            continue
        x = make(name, shape, dtype)
        values, total = fake_quantize(x, text, stats=True)
        again, each = fake_quantize(x, text, stats="block")
        assert_same(values, fake_quantize(x, text), text)
        assert_same(values, again, text)
        assert_same(total.counts, each.counts.sum((0, 1)))
        if name in FINITE:
            assert int(total.nonzeros) == int(x.count_nonzero())
            assert int(total.flushed) == int(((x != 0) & (values == 0)).sum())
            assert_same(total.amax, x.float().abs().max())
            assert_same(each.amax.double(), amax_of(x, text.split(":")[1]))


def test_statistics_are_called_what_they_are() -> None:
    """Compare each statistic with a count from the values, on data for which all statistics are different."""
    x = make("ties", (64, 128)).clamp(-3, 3)
    x[:3, :7] = 7.5  # the block's scale is 1, and 7.5 is beyond 7, the last tie of e2m1, so it saturates
    x[:, 7:9] = 2.0**-9
    x[4:8, ::20] = 0.0
    x[60, 5:25] = math.inf
    values, stats = fake_quantize(x, "e2m1:16x16:mx", stats=True)
    some = x != 0
    assert int(stats.nonzeros) == int(some.sum())
    assert int(stats.flushed) == int((some & (values == 0)).sum())
    assert int(stats.saturated) == int((values - x == -1.5).sum()) == 21
    assert int(stats.nonfinite) == int((~x.isfinite()).sum()) == 20
    assert int(stats.lost) == int((~values.isfinite()).sum()) == 2 * 256
    assert float(stats.amax) == math.inf
    x = x[:48]
    values, stats = fake_quantize(x, "e2m1:16x16:mx:stochastic", seed=1, stats=True)
    errors = (x - values).abs()[x != 0] / x.abs()[x != 0]
    assert int(stats.capped) == int((errors > 1).sum()) > 0
    assert float(stats.error_sum) == pytest.approx(float(errors.clamp(max=1).double().sum()))
    assert float(stats.error) == float(stats.error_sum) / int(stats.nonzeros)
    assert float(stats.amax) == 7.5


# Storage cost


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("e2m1:1x16:nvfp4", 4.5 + 32 / 65536),
        ("e2m1:16x16:nvfp4", 4 + 8 / 256 + 32 / 65536),
        ("e2m1:1x32:e8m0", 4.25),
        ("e2m1:1x32:mx", 4.25),
        ("e4m3:1x32:mx", 8.25),
        ("e3m2:1x32:mx", 6.25),
        # GAM: 8 bits for the exponent of each block; and for the group a mantissa of 23 bits, which we store as float32
        # and so count as 32 bits.
        ("e4m3:128x128:gam", 8 + 8 / 16384 + 32 / 65536),
        ("e4m3:128x128:gam:group=row", 8 + 8 / 16384 + 2 * 32 / 65536),
        ("e4m3:128x128:amax", 8 + 32 / 16384),
        ("bf16", 16),
    ],
)
def test_metadata_costs_what_the_papers_say(text: str, bits: float) -> None:
    assert encode(torch.randn(256, 256), text).bits_per_element == bits
