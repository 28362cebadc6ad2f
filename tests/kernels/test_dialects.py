"""Dialects equal the packages that they describe, and the search names the step in which an implementation differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fewbits import check_randomness, conform, encode, fake_quantize
from fewbits.kernels.conformance import cases, golden, read, stored
from fewbits.kernels.dialects import DIALECTS, evaluate
from tests.effort import DEEP
from tests.kernels.inputs import assert_same, generator
from tests.kernels.oracles import GOLDEN, ORACLES, installed

FLT_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize("name", ORACLES)
def test_a_dialect_gives_the_recorded_results_of_its_package(name: str) -> None:
    dialect, compared = DIALECTS[name], 0
    with safe_open(GOLDEN, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            if key.startswith(f"{name}/"):
                _, case, quantity, of = key.split("/")
                x = file.get_tensor(of)
                got = read({quantity: file.get_tensor(key)}, dialect, x)[quantity]
                want = getattr(evaluate(x, dialect), quantity)
                assert_same(got.to(want.dtype), want, f"{name}, {case}, {quantity}")
                compared += 1
    assert compared >= 16


@pytest.mark.deep
@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("seed", range(3))
def test_a_dialect_equals_its_package_on_all_cases(name: str, seed: int) -> None:
    if installed(name) is None:
        pytest.skip(f"{ORACLES[name][0]} is not installed")
    report = conform(ORACLES[name][1], name, seed=seed)
    assert report.equal, "\n".join(report.lines())


def ours(x: Tensor, quantizer: str) -> dict[str, Tensor | None]:
    packed = encode(x, quantizer)
    values = fake_quantize(x, quantizer)
    return {"codes": packed.codes, "scales": packed.scales, "tensor": packed.group_scales, "values": values}


@pytest.mark.parametrize("name", ["fewbits-nvfp4", "fewbits-mxfp8"])
def test_equal_implementations_give_no_false_alarm(name: str) -> None:
    dialect = DIALECTS[name]
    assert conform(lambda x: ours(x, dialect.quantizer), name).equal
    g = generator(5)
    for _ in range(1000 if DEEP else 100):
        rows, cols, size = (int(n) for n in torch.randint(1, 70, (3,), generator=g))
        x = torch.randn(rows, cols, generator=g) * torch.exp(size / 10 * torch.randn(rows, cols, generator=g))
        got, want = read(ours(x, dialect.quantizer), dialect, x), evaluate(x, dialect)
        for quantity, tensor in got.items():
            assert_same(tensor, getattr(want, quantity).to(tensor.dtype), quantity)


# Mutants of a reference that was written apart from the dialects: TransformerEngine's NVFP4, one line for each step.


def even(v: Tensor) -> Tensor:
    """Round magnitudes up to 6 to E2M1: spacings 0.5, 1 and 2, ties to the even multiple."""
    spacing = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
    return (v / spacing).round() * spacing


def away(v: Tensor) -> Tensor:
    spacing = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
    return (v.double() / spacing + 0.5).floor() * spacing


def nearest_scale(u: Tensor) -> Tensor:
    return u.clamp(max=448).to(torch.float8_e4m3fn).float()


def floor_scale(u: Tensor) -> Tensor:
    s = nearest_scale(u)
    below = (s.to(torch.float8_e4m3fn).view(torch.uint8) - 1).view(torch.float8_e4m3fn).float()
    return torch.where((s > u) & (s > 0), below, s)


def up_scale(u: Tensor) -> Tensor:
    s = nearest_scale(u)
    above = (s.to(torch.float8_e4m3fn).view(torch.uint8) + 1).view(torch.float8_e4m3fn).float()
    return torch.where((s < u) & (s < 448), above, s)


def toward_zero(v: Tensor) -> Tensor:
    spacing = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
    return (v.double() / spacing - 0.5).ceil() * spacing


def reference(
    x: Tensor,
    encode_scale: Callable[..., Tensor] = lambda top, amax: top / amax,
    block_scale: Callable[..., Tensor] = lambda amax, g: amax * (g * (1 / torch.full_like(g, 6))),
    store: Callable[[Tensor], Tensor] = nearest_scale,
    scaled: Callable[..., Tensor] = lambda x, s, d: x * (1 / (s * d)).clamp(max=FLT_MAX),
    rounded: Callable[[Tensor], Tensor] = even,
    sign: Callable[..., Tensor] = lambda v, q: v < 0,
    target: float = 448.0,
) -> tuple[Tensor, Tensor]:
    """Return codes, two in a byte, and scales."""
    blocks = x.view(x.shape[0], -1, 16)
    amax = blocks.abs().amax()
    g = encode_scale(torch.full_like(amax, 6 * target), amax).clamp(max=FLT_MAX)
    g = torch.where(g == 0, 1, g)  # of a tensor with an infinity
    s = store(block_scale(blocks.abs().amax(-1, keepdim=True), g))
    v = scaled(blocks, s, 1 / g)
    q = rounded(v.abs().clamp(max=6)).float().nan_to_num(0)
    index = torch.searchsorted(torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]), q)
    codes = (index + 8 * sign(v, q)).view(x.shape).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, s.squeeze(-1).to(torch.float8_e4m3fn)


MUTANTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "the block's amax is divided by 6": ({"block_scale": lambda amax, g: amax / 6 * g}, {"block_scale"}),
    "elements are divided": ({"scaled": lambda x, s, d: x / (s * d)}, {"element"}),
    "scales are rounded down": ({"store": floor_scale}, {"scale_rounding"}),
    "there is no tensor scale": ({"encode_scale": lambda top, amax: torch.ones_like(amax)}, {"tensor_scale"}),
    "the tensor scale is a product": ({"encode_scale": lambda top, amax: 1 / amax * top}, {"tensor_scale"}),
    "ties go away from zero": ({"rounded": away}, {"ties"}),
    "products are not rounded": (
        {"scaled": lambda x, s, d: x.double() * (1 / (s * d)).clamp(max=FLT_MAX).double()},
        {"product"},
    ),
    "scales are rounded to bf16 first": ({"store": lambda u: nearest_scale(u.bfloat16().float())}, set()),
    "0.5 is added in float32": ({"rounded": lambda v: (v + 0.5).floor()}, set()),
    "scales down, ties away": ({"store": floor_scale, "rounded": away}, {"scale_rounding", "ties"}),
    "both are divided": (
        {"block_scale": lambda amax, g: amax / 6 * g, "scaled": lambda x, s, d: x / (s * d)},
        {"block_scale", "element"},
    ),
    "scales are rounded up": ({"store": up_scale}, {"scale_rounding"}),
    "0.5 becomes 0": ({"rounded": lambda v: torch.where(even(v) == 0.5, 0, even(v))}, set()),
    "target 256, ties to zero": ({"target": 256.0, "rounded": toward_zero}, {"target", "ties"}),
    "target 256, unsigned zeros": ({"target": 256.0, "sign": lambda v, q: (v < 0) & (q > 0)}, {"target", "zero_sign"}),
}


def power_reference(
    x: Tensor, up: Callable[[Tensor], Tensor] = torch.zeros_like, rounded: Callable[[Tensor], Tensor] = even
) -> Tensor:
    """Return values in MXFP4 by the rule of OCP. up: whether the exponent rises, for significands from 0.5 to 1."""
    blocks = x.view(x.shape[0], -1, 32).double()
    significand, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    scale = torch.exp2((exponent - 3 + up(significand)).clamp(-127, 127).double())
    scale = torch.where(significand == 0, 2.0**-127, scale)
    return (rounded((blocks / scale).abs().clamp(max=6)) * scale).copysign(blocks).float().view(x.shape)


POWER_MUTANTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "exponents are rounded up": ({"up": lambda m: m > 0.5}, {"exponent"}),
    "no value saturates": ({"up": lambda m: m > 0.75}, {"exponent"}),
    "6 saturates, too": ({"up": lambda m: m >= 0.75}, set()),
    "no value saturates, ties away": ({"up": lambda m: m > 0.75, "rounded": away}, {"exponent", "ties"}),
}
REFERENCES: dict[str, tuple[Callable[..., Any], dict[str, tuple[dict[str, Any], set[str]]]]] = {
    "te-nvfp4": (reference, MUTANTS),
    "ocp-mxfp4": (power_reference, POWER_MUTANTS),
}


def test_the_references_of_the_mutants_equal_the_dialects() -> None:
    assert all(conform(function, dialect).equal for dialect, (function, _) in REFERENCES.items())


@pytest.mark.parametrize(
    ("dialect", "name"), [(key, name) for key, (_, mutants) in REFERENCES.items() for name in mutants]
)
def test_a_mutant_is_named_rightly_or_unknown(dialect: str, name: str) -> None:
    function, mutants = REFERENCES[dialect]
    changes, steps = mutants[name]
    report = conform(lambda x: function(x, **changes), dialect)
    assert not report.equal
    named = [{step.partition("=")[0] for step in alternative} for alternative in report.steps]
    assert named == [steps] if steps else not named, report.lines()


def test_the_first_difference_is_located() -> None:
    def wrong(x: Tensor) -> Tensor:
        values = evaluate(x, DIALECTS["te-nvfp4"]).values.clone()
        values[1, 40] += 1
        return values

    report = conform(wrong, "te-nvfp4")
    assert report.first is not None
    assert (report.first.quantity, report.first.index, report.first.block) == ("values", (1, 40), (1, 2))
    assert report.first.got == report.first.want + 1
    assert report.steps == ()
    assert "unknown" in report.lines()[-1]


@pytest.mark.parametrize("name", DIALECTS)
def test_stored_vectors_are_read_back(name: str) -> None:
    dialect = DIALECTS[name]
    tensors, metadata = golden(dialect)
    assert metadata["dialect"] == name
    for case, x in cases(dialect).items():
        if case in dialect.undefined:
            assert f"{case}.x" not in tensors
            continue
        want = evaluate(x, dialect)
        got = read(
            {key: tensors[f"{case}.{key}"] for key in stored(want, dialect, (x.shape[0], x.shape[1]))}, dialect, x
        )
        for quantity, tensor in got.items():
            assert_same(tensor, getattr(want, quantity).to(tensor.dtype), f"{case}, {quantity}")


def stochastic(x: Tensor, seed: int) -> Tensor:
    return fake_quantize(x, "e2m1:1x16:nvfp4:stochastic", seed=seed)


def biased(x: Tensor, step: int, rank: int) -> Tensor:
    """Mix stochastic results with 3 % of results rounded to nearest."""
    nearest = torch.rand(x.shape, generator=generator(step + 1000 * rank)) < 0.03
    return torch.where(nearest, fake_quantize(x, "e2m1:1x16:nvfp4"), stochastic(x, step + 1000 * rank))


def repeated_draws(x: Tensor, step: int, rank: int, period: int) -> Tensor:
    """Round with a stream of random numbers, over all steps, that repeats after a period."""
    low = (x / 64).floor() * 64
    draws = torch.rand(period, generator=generator(rank))
    draws = draws[(torch.arange(x.numel()) + step * x.numel()) % period].view(x.shape)
    return torch.where((x - low) / 64 > draws, low + 64, low)


def with_nan(x: Tensor, step: int, rank: int) -> Tensor:
    values = stochastic(x, step + 1000 * rank)
    values[3, 5] = torch.nan
    return values


STREAMS: dict[str, tuple[Callable[[Tensor, int, int], Tensor], str]] = {
    "sound": (lambda x, step, rank: stochastic(x, step + 1000 * rank), ""),
    "biased": (biased, "bias at"),
    "same on all ranks": (lambda x, step, rank: stochastic(x, step), "correlation, ranks"),
    "ranks 20 steps apart": (lambda x, step, rank: stochastic(x, step + 20 * rank), "correlation, ranks"),
    "repeats after 8 steps": (lambda x, step, rank: stochastic(x, step % 8 + 1000 * rank), "correlation, stream"),
    **{
        f"repeats after {period}": (partial(repeated_draws, period=period), "correlation, stream")
        for period in (48, 64, 512, 1000, 24 * 512, 50_000)
    },
    "other values": (lambda x, step, rank: stochastic(x, step + 1000 * rank) + (step == 3), "neighbours"),
    "not rounded": (lambda x, step, rank: x + step % 2, "neighbours"),
    "a NaN": (with_nan, "neighbours"),
    "half of the columns": (
        lambda x, step, rank: stochastic(x, step + 1000 * rank) * (torch.arange(512) < 200) * 1e-3,
        "between neighbours",
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_randomness_is_judged(name: str) -> None:
    function, failing = STREAMS[name]
    failed = [check.name for check in check_randomness(function) if not check.passed]
    assert any(text.startswith(failing) for text in failed) if failing else not failed, failed


def test_rounding_without_randomness_is_refused() -> None:
    with pytest.raises(ValueError, match="does not round stochastically"):
        check_randomness(lambda x, step, rank: fake_quantize(x, "e2m1:1x16:nvfp4"))
    with pytest.raises(ValueError, match="tensor of values of shape"):
        check_randomness(lambda x, step, rank: x[0])
