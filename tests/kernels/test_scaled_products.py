"""Test the operands of scaled products, their layouts in memory, and the products of the decoded operands."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fewbits import Quantizer, encode, fake_quantize
from fewbits.kernels.backends import build, cpu, reference
from fewbits.kernels.packing import operand_layout, swizzle, unpack
from fewbits.kernels.scaled_products import FORMS, GPUS, ScaledOperand, encode_operands, form_of, scaled_product
from tests.kernels.inputs import DTYPES, EMPTY, KINDS, ODD, assert_same, make

U = 2.0**-8  # the largest relative error of rounding to BF16
LAST = {torch.bfloat16: U, torch.float32: 2.0**-20, torch.float16: 2.0**-11}  # dtype -> a bound of its last rounding
OPTIONS = {"e2m1:1x16:eden": ":rht16", "e2m1:1x16:nvfp4": ":stochastic:rht16"}
SPECS = [text + OPTIONS.get(text, "") for form in FORMS.values() for text in form.quantizers]
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def operand(x: Tensor, text: str, axis: int = -1) -> ScaledOperand:
    return encode_operands(x, (text, axis, 0))[0]


@needs_compiler
@pytest.mark.parametrize("text", SPECS)
def test_the_cpu_gives_the_references_operands_along_either_axis_and_both_at_once(text: str) -> None:
    q = Quantizer.parse(text)
    for i, shape in enumerate((*ODD, *EMPTY, (144, 272))):
        x = make(list(KINDS)[i % len(KINDS)], shape, DTYPES[i % 3], seed=i)
        of = ((q, -1, 3), (q, 0, 5))
        want = reference.encode_operands(x, *of)
        for got in (cpu.BACKEND.encode_operands(x, *of), [cpu.BACKEND.encode_operands(x, each)[0] for each in of]):
            for (a, b), what in product(zip(got, want, strict=True), (0, 1, 2)):
                assert_same(a[what], b[what], f"{('codes', 'scales', 'groups')[what]} of {text}, {shape}")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("text", SPECS)
def test_an_operand_has_the_codes_and_scales_of_packed_storage(text: str, axis: int) -> None:
    """Check that codes are those of `encode` along the sum, and that decoding gives fake quantization's values."""
    q = Quantizer.parse(text)
    for shape, dtype in (((130, 150), torch.float32), ((32, 384), torch.bfloat16)):
        x = make("normal", shape, dtype)
        packed, got = encode(x, q, axis=axis, seed=0), operand(x, text, axis)
        lines, length = shape if axis == -1 else shape[::-1]
        codes = unpack(packed.codes, q.format.bits, shape[1])
        assert torch.equal(unpack(got.codes, q.format.bits, length), codes if axis == -1 else codes.t())
        values = got.decode()[:, :length]
        want = fake_quantize(x, q, axis=axis, seed=0)
        values = values if axis == -1 else values.t()
        if q.traits.kind != "float":
            assert_same(values.to(dtype), want)
        else:  # the operand has the reciprocal of the scale, so its values have one more rounding
            torch.testing.assert_close(
                values.to(dtype), want, rtol=2.0**-22 if dtype == torch.float32 else 2 * U, atol=0
            )
        assert operand_layout(q, axis, *shape).stored[0][0][0] == lines == len(got.codes)


def test_scales_are_swizzled_as_cublas_documents_it() -> None:
    """Check places that cuBLAS's documentation gives: 16 bytes have lines i, i + 32, i + 64, i + 96 of four blocks."""
    places = swizzle(300, 9, torch.device("cpu"))
    assert places[0, :5].tolist() == [0, 1, 2, 3, 512]
    assert places[[1, 32, 64, 96, 127, 128], 0].tolist() == [16, 4, 8, 12, 31 * 16 + 12, 3 * 512]
    assert places.flatten().unique().numel() == places.numel()


@pytest.mark.parametrize("lines", [16, 130])
def test_swizzled_scales_equal_those_of_torchs_and_torchaos_helpers(lines: int) -> None:
    try:
        from torch.testing._internal.common_quantized import to_blocked
    except ImportError:
        to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    x = make("normal", (lines, 144))
    for text in ("e4m3:1x32:e8m0", "e2m1:1x16:nvfp4"):
        scales = encode(x, text).scales
        assert torch.equal(operand(x, text).scales.flatten(), to_blocked(scales))


@pytest.mark.parametrize("forms", GPUS, ids=" x ".join)
@pytest.mark.parametrize("dtype", LAST)
def test_a_product_is_that_of_the_decoded_operands_within_the_bound(forms: tuple[str, str], dtype: torch.dtype) -> None:
    rows, inner, cols = 37, 256, 48
    x, w, bias = normal(rows, inner, seed=1), normal(cols, inner, seed=2), normal(cols, seed=3).bfloat16()
    a, b = (operand(t, FORMS[form].quantizers[0]) for t, form in zip((x, w), forms, strict=True))
    exact, magnitude = a.decode().double() @ b.decode().double().t(), a.decode().abs() @ b.decode().abs().t()
    for added in (None, bias):
        y = scaled_product(a, b, dtype, added)
        want, size = (exact, magnitude) if added is None else (exact + added.double(), magnitude + added.float().abs())
        assert y.dtype == dtype
        assert ((y.double() - want).abs() <= size.double() * (2.0**-20 + LAST[dtype])).all()


@pytest.mark.parametrize("forms", GPUS, ids=" x ".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_accepts_the_arguments_of_a_product(forms: tuple[str, str], dtype: torch.dtype) -> None:
    """Check each form along both axes by torch's own shape function, with the layouts that training has."""
    for rows, inner, cols in ((256, 512, 384), (128, 128, 256)):
        for axes in product((-1, 0), repeat=2):
            a, b = (
                operand(torch.empty((n, inner)[:: 1 if axis else -1], device="meta"), FORMS[form].quantizers[0], axis)
                for n, form, axis in zip((rows, cols), forms, axes, strict=True)
            )
            y = scaled_product(a, b, dtype, torch.empty(cols, dtype=torch.bfloat16, device="meta"))
            assert (y.shape, y.dtype, y.device.type) == ((rows, cols), dtype, "meta")


@pytest.mark.parametrize("text", ["e4m3:tensor:amax", "e4m3:channel:amax", "e4m3:1x128:amax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_small_integers_are_exact(text: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, (n, 128), generator=g).float() for n in (32, 48))
    for t in (x, w):
        t[:, 0] = 448  # E4M3's largest value: the scale is 1, and all integers up to 16 have codes
    assert torch.equal(scaled_product(operand(x, text), operand(w, text), dtype), (x @ w.t()).to(dtype))


@pytest.mark.parametrize("text", ["e4m3:channel:amax", "e4m3:1x32:e8m0", "e2m1:1x16:nvfp4"])
def test_a_block_that_is_not_finite_makes_its_results_nan(text: str) -> None:
    x, w = normal(32, 64, seed=0), normal(48, 64, seed=1)
    x[3, 5] = torch.inf
    y = scaled_product(operand(x, text), operand(w, text), torch.bfloat16)
    assert y[3].isnan().all()
    assert y[torch.arange(32) != 3].isfinite().all()


@pytest.mark.parametrize(("text", "inner", "cols"), [("e4m3:channel:amax", 40, 48), ("e4m3:1x128:amax", 192, 48)])
def test_sizes_that_gpus_cannot_multiply_are_refused_everywhere(text: str, inner: int, cols: int) -> None:
    x, w = normal(32, inner, seed=0), normal(cols, inner, seed=1)
    with pytest.raises(ValueError, match="must be a multiple"):
        scaled_product(operand(x, text), operand(w, text), torch.bfloat16)


def test_only_the_quantizers_of_a_form_can_be_encoded_as_operands() -> None:
    named = {
        "e4m3:channel:amax:stochastic": "channel",
        "e4m3:128x128:amax": "128x128",
        "e4m3:1x32:e8m0:rht32": "mxfp8",
        "e2m1:16x16:nvfp4": "nvfp4",
        "e2m1:1x16:eden:rht128": "nvfp4",
        "e2m1:1x32:mx": "mxfp4",
    }
    others = ("e5m2:tensor:amax", "e4m3:16x1:amax", "e4m3:tensor:gam", "e2m1:1x16:ue5m3", "e4m3", "bf16")
    assert {text: form_of(Quantizer.parse(text)) for text in named} == named
    assert not any(form_of(Quantizer.parse(text)) for text in others)
    assert form_of(None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("forms", GPUS, ids=" x ".join)
@pytest.mark.parametrize("dtype", LAST)
def test_gpus_that_have_a_product_compute_it_as_the_cpu_does(forms: tuple[str, str], dtype: torch.dtype) -> None:
    """Check on a GPU against the CPU's product of the same operands; FP8 sums of GPUs have at least 13 bits."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in GPUS[forms]:
        pytest.skip(f"no GPU here multiplies {' and '.join(forms)}")
    for rows, inner, cols in ((256, 512, 384), (130, 1024, 128)):
        x, w = normal(rows, inner, seed=1), normal(cols, inner, seed=2)
        texts = [FORMS[form].quantizers[0] for form in forms]
        here, there = ([operand(t.to(d), q) for t, q in zip((x, w), texts, strict=True)] for d in ("cpu", "cuda"))
        for ours, theirs in zip(here, there, strict=True):
            for one, other in zip(ours[:3], theirs[:3], strict=True):
                assert_same(other.cpu(), one, str(forms))
        bias = normal(cols, seed=3).to(dtype)
        size = here[0].decode().abs() @ here[1].decode().abs().t() + bias.float().abs()
        want, got = (
            scaled_product(here[0], here[1], dtype, bias),
            scaled_product(there[0], there[1], dtype, bias.cuda()).cpu(),
        )
        assert ((got.double() - want.double()).abs() <= size.double() * (2.0**-12 + 2 * LAST[dtype])).all()
