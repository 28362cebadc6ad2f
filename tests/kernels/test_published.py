"""Compare quantizers with recorded results of published ones (tests/golden/published.py), and test their options."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.packed import Packed, decode, encode
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.scaled_products import form_of
from tests.golden.published import FILE
from tests.kernels.inputs import assert_same, make
from tests.messages import naming


@cache
def recorded() -> dict[str, Tensor]:
    return load_file(FILE)


KEYS = [key.split(" ", 2) for key in recorded() if not key.startswith("input")]
CASES = sorted({(package, spec) for package, _, spec in KEYS})
NAMES = [key.removeprefix("input ") for key in recorded() if key.startswith("input")]


def errors(x: Tensor, y: Tensor, select: str, block: int) -> Tensor:
    """Return the error of each block of `block` x 16 elements."""
    gap = (x.double() - y.double()).abs().view(x.shape[0] // block, block, x.shape[1] // 16, 16)
    return gap.amax((1, 3)) if select == "max" else (gap**2 if select == "mse" else gap).sum((1, 3))


@pytest.mark.parametrize(("package", "spec"), [case for case in CASES if "@" not in case[1]])
def test_codes_and_scales_are_those_of_a_published_quantizer(package: str, spec: str) -> None:
    """Check bits. Where both scales of a block have errors that are equal but for roundings, either is right."""
    for name in (name for name in NAMES if f"{package} {name} {spec}" in recorded()):
        x, want = recorded()[f"input {name}"], recorded()[f"{package} {name} {spec}"]
        packed = encode(x, spec)
        assert packed.scales is not None
        codes, scales = want[: packed.codes.numel()].view_as(packed.codes), want[packed.codes.numel() :]
        if "int4" in spec:  # whose codes are two's complements
            assert_same(packed.scales.flatten(), scales, name)
            n = nibbles(packed.codes)
            assert_same((n & 7) * (1 - (n >> 2 & 2)), (nibbles(codes) ^ 8) - 8, name)
            continue
        assert packed.scales is not None
        its = replace(packed, codes=codes, scales=scales.view_as(packed.scales))
        tall = packed.quantizer.block.rows or 1
        if packed.quantizer.select:
            other = (packed.scales != its.scales) | ~same_codes(packed, its, tall)
            mine, theirs = (
                errors(x, decode(replace(one, dtype=torch.float32)), packed.quantizer.select, tall)
                for one in (packed, its)
            )
            assert bool(((mine - theirs).abs() <= 1e-3 * mine)[other].all()), name
            assert int(other.sum()) <= 5, name
        else:
            assert its.scales is not None
            assert_same(packed.scales, its.scales, name)
            assert bool(same_codes(packed, its, tall).all()), name


def nibbles(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()


def same_codes(a: Packed, b: Packed, tall: int) -> Tensor:
    """Tell for each block whether its codes are equal; zeros of either sign are equal."""
    one, other = nibbles(a.codes), nibbles(b.codes)
    equal = (one == other) | (one & 7 == 0) & (other & 7 == 0)
    return equal.view(len(one) // tall, tall, -1, 16).all(3).all(1)


@pytest.mark.parametrize(("package", "spec"), [case for case in CASES if "@" in case[1]])
def test_a_mixture_makes_the_choices_of_if4(package: str, spec: str) -> None:
    select = spec.partition("@")[2].partition("<")[0].strip()
    for name in (name for name in NAMES if f"{package} {name} {spec}" in recorded()):
        x, want = recorded()[f"input {name}"].float(), recorded()[f"{package} {name} {spec}"]
        _, choice = mix(x, spec)
        chosen = want[-choice.numel() :].view_as(choice) < 128  # the sign of the scale is that of an integer block
        integers, floats = (errors(x, fake_quantize(x, f"{f}:1x16:nvfp4"), select, 1) for f in ("int4", "e2m1"))
        other = choice.bool() != chosen
        assert bool(((integers - floats).abs() <= 1e-4 * floats)[other].all()), name
        assert int(other.sum()) <= 2, name


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("scaling", ["nvfp4", "ue5m3", "fouroversix:select=mae", "nvfp4:stochastic"])
@pytest.mark.parametrize(
    ("block", "group"), [("1x16", "row"), ("1x16", 32), ("1x8", 128), ("16x16", "row"), ("4x16", 64)]
)
def test_a_group_is_quantized_as_a_tensor_of_its_own(block: str, group: str | int, scaling: str, axis: int) -> None:
    x = make("lognormal", (37, 150), torch.float32, seed=3)
    spec, (tall, _) = f"e2m1:{block}:{scaling}", (Quantizer.parse(f"e2m1:{block}:amax").block.resolve(x.shape))
    spec = spec.replace("fouroversix", f"fouroversix:group={group}") if "four" in spec else f"{spec}:group={group}"
    alone = spec.replace(f":group={group}", "")
    y, packed = fake_quantize(x, spec, axis=axis, seed=5), encode(x, spec, axis=axis, seed=5)
    assert_same(decode(packed), y)
    lines, wide = (x if axis == -1 else x.t()), 10**6 if group == "row" else int(group)
    parts = [part for line in lines.split(tall) for part in line.split(wide, 1)]
    assert packed.group_scales is not None
    assert packed.group_scales.numel() == len(parts)
    if "stochastic" in spec:  # random bits belong to elements
        return
    got = [part for line in (y if axis == -1 else y.t()).split(tall) for part in line.split(wide, 1)]
    for part, values in zip(parts, got, strict=True):
        assert_same(values.contiguous(), fake_quantize(part.contiguous(), alone))


def test_a_factor_multiplies_before_rounding_and_divides_the_result() -> None:
    """Check `mx` with 3/4 (arXiv 2502.20586): with the scale 1, 7.9 would saturate at 6."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([7.9, 6.0, 4.0, -1.0])
    want = torch.tensor([6.0, 4.0, 3.0, -1.0]) * (1 / torch.tensor(0.75))
    packed = encode(x, "e2m1:1x32:mx:factor=0.75")
    assert packed.scales is not None
    assert packed.scales.tolist() == [[127]]
    assert_same(decode(packed)[0, :4], want)
    assert_same(fake_quantize(x, "e2m1:1x32:mx:factor=3/4")[0, :4], want)
    assert fake_quantize(x, "e2m1:1x32:mx")[0, 0] == 6


@pytest.mark.parametrize("spec", ["e2m1:1x32:mx:stochastic:factor=3/4", "e2m1:1x16:nvfp4:stochastic:factor=16/17"])
def test_with_room_below_the_largest_value_stochastic_rounding_is_unbiased(spec: str) -> None:
    x = make("normal", (8, 64), torch.float32, seed=1)
    _, stats = fake_quantize(x, spec, seed=0, stats=True)
    assert stats.saturated == 0
    mean = torch.stack([fake_quantize(x, spec, seed=seed) for seed in range(300)]).mean(0)
    assert abs(float((mean * x).sum() / (x * x).sum()) - 1) < 0.004


@pytest.mark.parametrize("scaling", ["nvfp4", "fouroversix", "ue5m3"])
def test_the_target_is_the_scale_of_the_block_with_the_largest_value(scaling: str) -> None:
    x = make("normal", (16, 16), torch.float32, seed=2)
    for target in (256, 448, 100):
        packed = encode(x, f"e2m1:16x16:{scaling}:target={target}")
        assert packed.group_scales is not None
        assert packed.group_scales[0] == 1 / (torch.tensor(6.0) * target / x.abs().max())


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("e2m1:1x16:nvfp4:group=24", ("group", "24", "16, 32")),
        ("e2m1:1x48:nvfp4:group=64", ("group 64 with block 1x48", "whole blocks")),
        ("e2m1:1x16:eden:rht16:group=row", ("group 'row' with scaling 'eden'", "nvfp4, ue5m3, fouroversix")),
        ("e4m3:1x16:gam:group=32", ("group 32 with scaling 'gam'",)),
        ("e4m3:1x16:amax:factor=0.75", ("factor=0.75 with scaling 'amax'", "mx, nvfp4")),
        ("e2m1:1x32:mx:target=256", ("target=256", "'mx'")),
        ("e2m1:1x16:nvfp4:select=mae", ("select=mae", "fouroversix")),
        ("e2m1:1x16:fouroversix:select=least", ("select 'least'", "mse, mae, max")),
        ("e2m1:1x32:mx:factor=2", ("factor 2.0", "0.5 to below 2")),
        ("bf16:1x16:nvfp4:factor=17/16", ("factor", "beyond FP32")),
        ("e2m1:1x32:mx:factor=1/0", ("factor '1/0'", "16/17")),
        ("e2m1:1x16:nvfp4:target=449", ("target 449.0", "1 to 448")),
    ],
)
def test_an_option_that_a_scaling_lacks_is_refused(spec: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        Quantizer.parse(spec)


def test_scaled_products_read_only_one_second_level_scale_and_no_factor() -> None:
    assert form_of(Quantizer.parse("e2m1:1x16:fouroversix:select=mae:target=448:factor=16/17")) == "nvfp4"
    assert form_of(Quantizer.parse("e2m1:1x16:nvfp4:group=row")) is None
    assert form_of(Quantizer.parse("e2m1:1x32:mx:factor=3/4")) is None
