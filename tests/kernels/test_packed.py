"""Check that packed storage decodes to fake quantization's values bit for bit, in standard layouts."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbits import Format, Packed, decode, encode, fake_quantize
from tests.effort import DEEP, examples
from tests.kernels.inputs import COMPILED, DTYPES, EMPTY, FINITE, KINDS, ODD, assert_same, make
from tests.messages import naming

FORMATS = ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "bf16", "fp16", "e4m3ieee", "e1m1", "e2m2", "e4m7", "e8m3")
VARIANTS = ("", ":stochastic", ":rht16", ":stochastic:rht8", ":rht64:signs=3")


def spell(name: str, block: str, scaling: str, variant: str = "") -> str:
    return f"{name}{variant}" if scaling == "none" else f"{name}:{block}:{scaling}{variant}"


def check(x: Tensor, text: str, axis: int = -1, seed: int = 3) -> Packed:
    packed = encode(x, text, axis=axis, seed=seed)
    assert_same(decode(packed), fake_quantize(x, text, axis=axis, seed=seed), f"{text}, {axis=}, {tuple(x.shape)}")
    return packed


def codes_of(packed: Packed) -> Tensor:
    """Return the codes [rows, cols], read bit by bit, from the lowest bit of a row's first byte upwards."""
    cols, width = packed.shape[-1], packed.quantizer.format.bits
    width = width if width <= 8 else 16
    bits = (packed.codes.long()[..., None] >> torch.arange(8) & 1).flatten(1)[:, : cols * width]
    return (bits.view(len(bits), cols, width) << torch.arange(width)).sum(-1)


# Round trips


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scaling", COMPILED)
def test_what_decodes_is_what_the_fake_path_gives(name: str, scaling: str) -> None:
    """Check that decoding gives the bits of fake quantization, for each format and scaling and for many shapes.

    Blocks lie along both axes; without FEWBITS_TESTS=deep, along one axis for each format and scaling.
    """
    for i, (shape, axis) in enumerate(product(ODD, (-1, 0)), start=FORMATS.index(name)):
        if not DEEP and (i + COMPILED.index(scaling)) % 2:
            continue
        block = ("1x16", "16x16", "tensor", "channel", "3x5", "1x32", "128x128")[i % 7]
        name, block, variant = _allowed(name, block, scaling, VARIANTS[i % len(VARIANTS)])
        x = make(FINITE[i % len(FINITE)], shape, DTYPES[i % 3], seed=i)
        x = x / 128 if scaling == "none" else x  # so that no rotation overflows
        check(x, spell(name, block, scaling, variant), axis)


def _allowed(name: str, block: str, scaling: str, variant: str) -> tuple[str, str, str]:
    """Return (format, block, variant), replaced where the scaling allows only certain values."""
    if scaling == "eden":
        return "e2m1", "1x16", ":rht64:signs=3" if "rht64" in variant else ":rht16"
    return "e2m1" if scaling == "fouroversix" else name, block, variant


names = st.sampled_from(FORMATS)
blocks = st.sampled_from(["tensor", "channel", "16x16", "1x16", "32x1"]) | st.builds(
    "{}x{}".format, st.integers(1, 20), st.integers(1, 40)
)


@examples(300)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    names,
    blocks,
    st.sampled_from([s for s in COMPILED if s != "none"]),
    st.sampled_from(VARIANTS),
    st.sampled_from([-1, 0]),
)
def test_anything_with_a_scale_round_trips(
    name: str, dtype: torch.dtype, shape: tuple[int, int], grid: str, block: str, scaling: str, variant: str, axis: int
) -> None:
    """Check that decoding gives the bits of fake quantization for random formats, blocks and inputs.

    Inputs may have NaN and infinities: then the stored scale of their block is NaN.
    """
    grid, block, variant = _allowed(grid, block, scaling, variant)
    check(make(name, shape, dtype, seed=sum(shape)), spell(grid, block, scaling, variant), axis)


@pytest.mark.parametrize(
    "text", ["e4m3", "e5m2:overflow=inf", "e4m3:overflow=nan", "bf16", "fp16:overflow=inf", "e3m4"]
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_naive_casts_round_trip_with_their_infinities_and_nan(text: str, dtype: torch.dtype) -> None:
    for name in KINDS:
        check(make(name, (9, 50)).to(dtype), text)


def test_scalars_vectors_and_more_dimensions_keep_their_shape_and_dtype() -> None:
    for shape, dtype in product(((), (7,), (2, 3, 20), (1, 1, 1, 5)), (*DTYPES, torch.float64)):
        x = torch.ones(shape, dtype=dtype) * 1.3
        for text in ("e2m1:1x16:nvfp4", "e4m3:16x16:gam", "e3m2"):
            packed = check(x, text)
            assert (packed.shape, packed.dtype, packed.axis) == (x.shape, dtype, -1)


@pytest.mark.parametrize("text", ["e4m3", "e2m1", "bf16", "e2m1:1x16:nvfp4", "e4m3:8x8:gam:group=row", "e4m3:1x32:mx"])
@pytest.mark.parametrize("shape", [*EMPTY, (2, 0, 3), (0,)])
def test_nothing_is_stored_as_nothing(text: str, shape: tuple[int, ...]) -> None:
    for axis in (-1, 0):
        packed = check(torch.zeros(shape), text, axis)
        assert packed.codes.numel() == 0


# Layout


def test_the_even_column_lies_in_the_low_nibble() -> None:
    values = torch.tensor([[0.5, 6.0, -1.0, 0.0, 1.5]])
    assert encode(values, "e2m1").codes.tolist() == [[0x71, 0x0A, 0x03]]


@pytest.mark.parametrize("name", [n for n in FORMATS if Format.parse(n).bits <= 8])
def test_every_code_is_stored_as_itself(name: str) -> None:
    f = Format.parse(name)
    finite = [(code, value) for code, value in enumerate(f.values()) if math.isfinite(value)]
    packed = encode(torch.tensor([[value for _, value in finite]]), name)
    assert codes_of(packed)[0].tolist() == [code for code, _ in finite]
    assert packed.codes.shape == (1, -(-len(finite) * f.bits // 8))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_codes_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    x = fake_quantize(make("normal", (33, 20)), name)
    assert_same(encode(x, name).codes.view(dtype).float(), x)


# Scales by torch's own types


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    rows, cols = (torch.arange(n) // m for n, m in zip(shape, block, strict=True))
    return scales[rows[:, None], cols]


@pytest.mark.parametrize("text", ["e2m1:1x32:e8m0", "e2m1:1x32:mx", "e4m3:1x32:mx"])
def test_e8m0_scales_are_float8_e8m0fnu_and_multiply(text: str) -> None:
    x = make("lognormal", (40, 100))
    packed = encode(x, text)
    assert packed.scales is not None
    grid = torch.tensor(packed.quantizer.format.values())[codes_of(packed)]
    scales = packed.scales.view(torch.float8_e8m0fnu).float()
    assert_same(grid * spread(scales, (1, 32), x.shape), fake_quantize(x, text))


@pytest.mark.parametrize("text", ["e2m1:1x16:nvfp4", "e2m1:16x16:nvfp4"])
def test_nvfp4_scales_are_float8_e4m3fn_times_one_float(text: str) -> None:
    x = make("lognormal", (40, 100))
    packed = encode(x, text)
    assert packed.scales is not None
    assert packed.group_scales is not None
    grid = torch.tensor(packed.quantizer.format.values())[codes_of(packed)]
    scales = spread(packed.scales.view(torch.float8_e4m3fn).float(), packed.quantizer.block.resolve((40, 100)), x.shape)
    assert_same(grid * scales * packed.group_scales, fake_quantize(x, text))
    assert float(scales.max()) == 448  # the scale of the block that contains the tensor's largest value
    assert float(packed.group_scales) == pytest.approx(float(x.abs().max()) / (6 * 448), rel=2.0**-22)


def test_gam_scales_are_the_groups_mantissa_times_a_power_and_divide() -> None:
    x = make("lognormal", (40, 100))
    packed = encode(x, "e4m3:16x16:gam")
    assert packed.scales is not None
    assert packed.group_scales is not None
    scales = packed.group_scales * torch.exp2(packed.scales.float() - 127)
    grid = torch.tensor(packed.quantizer.format.values())[codes_of(packed)]
    assert_same(grid / spread(scales, (16, 16), x.shape), fake_quantize(x, "e4m3:16x16:gam"))


# NaN and what cannot be stored


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("e4m3:1x16:gam", 0xFF),
        ("e2m1:1x16:e8m0", 0xFF),
        ("e2m1:1x16:mx", 0xFF),
        ("e2m1:1x16:nvfp4", 0x7F),
        ("e2m1:1x16:ue5m3", 0xFF),
        ("e2m1:1x16:fouroversix", 0x7F),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_has_a_nan_scale_and_codes_of_zero(text: str, code: int, bad: float) -> None:
    x = torch.randn(2, 48)
    x[1, 20] = bad
    packed = check(x, text)
    assert packed.scales is not None
    assert (packed.scales == code).tolist() == [[False] * 3, [False, True, False]]
    assert not codes_of(packed)[1, 16:32].any()
    assert decode(packed)[1, 16:32].isnan().all()
    amax = encode(x, text.rsplit(":", 1)[0] + ":amax").scales
    assert amax is not None
    assert amax.isnan().tolist() == [[False] * 3, [False, True, False]]


def test_a_stored_nan_has_no_sign() -> None:
    x = torch.tensor([[math.nan, -math.nan, math.inf, -math.inf, 1000.0, -1000.0]])
    assert codes_of(encode(x, "e4m3")).tolist() == [[0x7F, 0x7F, 0x7F, 0x7F, 0x7E, 0xFE]]
    assert codes_of(encode(x, "e4m3:overflow=nan")).tolist() == [[0x7F] * 6]
    assert codes_of(encode(x * 1000, "e5m2:overflow=inf"))[0, 2:].tolist() == [0x7C, 0xFC, 0x7C, 0xFC]


def test_a_rotation_that_overflows_is_not_stored_as_zero() -> None:
    """Check that `encode` raises an error for finite values whose rotation overflows, instead of storing zeros.

    Fake quantization returns NaN for them, but e2m1 has no code for NaN.
    """
    x = torch.full((1, 16), 3e38)
    assert fake_quantize(x, "e2m1:rht16:signs=none").isnan().any()
    with pytest.raises(ValueError, match="no code for NaN"):
        encode(x, "e2m1:rht16:signs=none")


@pytest.mark.parametrize("text", ["e2m1:1x16:nvfp4", "e4m3:1x16:amax", "e4m3:16x16:gam", "e4m3"])
def test_what_is_stored_of_a_parameter_has_no_gradient(text: str) -> None:
    """Check that no stored tensor requires a gradient, scales included.

    Codes are integers without a gradient, so scales that required one would start a useless backward pass.
    """
    packed = encode(torch.nn.Parameter(torch.randn(32, 32)), text)
    for stored in (packed.codes, packed.scales, packed.group_scales, decode(packed)):
        assert stored is None or not stored.requires_grad


@pytest.mark.parametrize("text", ["e2m1:1x16:nvfp4:stochastic:rht16", "e4m3:16x16:gam:group=row", "e4m3", "bf16"])
def test_what_is_stored_can_be_saved_and_loaded_without_running_code(text: str, tmp_path: Path) -> None:
    x = make("lognormal", (33, 50), torch.bfloat16)
    packed = check(x, text, axis=0)
    torch.save({"weight": packed}, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=True)["weight"]
    assert_same(decode(loaded), decode(packed))
    assert (loaded.quantizer, loaded.shape, loaded.axis) == (packed.quantizer, packed.shape, 0)
    assert str(loaded.quantizer) == text
    assert hash(loaded.quantizer) == hash(packed.quantizer)


@pytest.mark.parametrize("broken", ["codes", "scales", "group_scales"])
def test_what_cannot_be_of_that_shape_is_refused_before_a_kernel_reads_it(broken: str) -> None:
    packed = encode(torch.randn(33, 50), "e4m3:16x16:gam:group=row")
    stored = getattr(packed, broken)
    for wrong in (stored[:-1].contiguous(), stored.double()):
        with pytest.raises(ValueError, match=naming("e4m3:16x16:gam:group=row", "50 columns")):
            decode(dataclasses.replace(packed, **{broken: wrong}))


def test_what_is_stored_moves_between_devices() -> None:
    for text in ("e2m1:1x16:nvfp4", "e4m3"):
        packed = encode(make("normal", (33, 50)), text)
        moved = packed.to("meta")
        for tensor in (moved.codes, moved.scales, moved.group_scales):
            assert tensor is None or tensor.device.type == "meta"
        assert moved.nbytes == packed.nbytes
        assert_same(decode(packed.to("cpu")), decode(packed))
