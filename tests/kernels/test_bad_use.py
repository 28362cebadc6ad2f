"""Check that invalid calls raise a ValueError whose message contains the wrong value and the valid values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fewbits import (
    Quantizer,
    decode,
    encode,
    fake_quantize,
    fake_quantize_both,
    gaussian_noise,
    mix,
    sample_weight,
    unpack_noise,
)
from tests.messages import naming

X = torch.randn(8, 32)
Y = X.clone()
BITS = torch.ones(1, 1)
MIX = "e4m3 @ error<0.1 | bf16"
SEED = "an integer from 0 to 2^63 - 1"
AXIS = "valid values are -1 ("
DTYPE = "valid dtypes are torch.bfloat16, torch.float16, torch.float32"
WORDS = torch.zeros(3, dtype=torch.int32)
Anything: Any = None

# name of the case -> (an invalid call, a part of the message that it must raise)
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "family for a format": (
        lambda: fake_quantize(X, "FP8"),
        "unknown format 'FP8' (did you mean e4m3 or e5m2?): valid",
    ),
    "recipe for a format": (
        lambda: fake_quantize(X, "nvfp4"),
        "(did you mean e2m1:1x16:nvfp4?): valid formats are e4m3, e5m2",
    ),
    "signs of a GEMM": (lambda: fake_quantize(X, "e4m3:rht16:signs=each"), "signs=each is only valid in recipes"),
    "MS-EDEN without a seed": (lambda: fake_quantize(X, "e2m1:1x16:eden:rht16"), f"needs seed=, {SEED}"),
    "no quantizer": (lambda: fake_quantize(X, Anything), "expected a Quantizer or its string form"),
    "mixture for a quantizer": (lambda: fake_quantize(X, MIX), f"(in quantizer {MIX!r})"),
    "quantizer for a mixture": (
        lambda: mix(X, _any(Quantizer())),
        "a Mixture or its string form, not Quantizer",
    ),
    "integers": (lambda: fake_quantize(X.int(), "e4m3"), DTYPE),
    "integers for both axes": (lambda: fake_quantize_both(X.int(), "e4m3", "e4m3"), DTYPE),
    "a list": (lambda: fake_quantize(_any([1.0]), "e4m3"), "expected a tensor, not list"),
    "a numpy array": (lambda: fake_quantize(_any(np.ones(2)), "e4m3"), "torch.from_numpy"),
    "axis 1": (lambda: fake_quantize(X, "e4m3", axis=1), AXIS),
    "axis of a mixture": (lambda: mix(X, MIX, axis=2), AXIS),
    "no seed": (lambda: fake_quantize(X, "e4m3:stochastic"), f"needs seed=, {SEED}"),
    "no seed for one axis": (lambda: fake_quantize_both(X, "e4m3", "e4m3:stochastic", row_seed=1), f"seed=, {SEED}"),
    "no seed to mix": (lambda: mix(X, "e4m3:stochastic @ error<0.1 | bf16"), f"needs seed=, {SEED}"),
    "negative seed": (lambda: fake_quantize(X, "e4m3", seed=-1), f"seed=-1: expected {SEED}"),
    "seed too large": (lambda: fake_quantize(X, "e4m3", seed=1 << 63), SEED),
    "seed that is a truth": (lambda: fake_quantize(X, "e4m3:stochastic", seed=True), f"seed=True: expected {SEED}"),
    "unknown statistics": (lambda: fake_quantize(X, "e4m3", stats=_any("blocks")), "False, True and 'block'"),
    "out of another shape": (
        lambda: fake_quantize(X, "e4m3", out=torch.empty(8, 31)),
        "expected (8, 32) torch.float32",
    ),
    "out on another device": (
        lambda: fake_quantize(X, "e4m3", out=X.to("meta")),
        "expected (8, 32) torch.float32 on cpu",
    ),
    "out that overlaps": (lambda: _overlapping(X.clone()), "out overlaps x in memory"),
    "out that overlaps itself": (
        lambda: fake_quantize(X, "e4m3", out=torch.empty(1, 32).expand(8, 32)),
        "out overlaps",
    ),
    "out of both axes that is x": (lambda: _into_both(Y, Y, Y.clone()), "out overlaps x"),
    "one out for both axes": (lambda: _into_both(X, Y, Y), "out overlaps x or the other result"),
    "out of a mixture that is x": (lambda: mix(Y, MIX, out=Y), "out overlaps x"),
    "out of another shape to decode": (
        lambda: decode(encode(X, "e4m3"), out=torch.empty(32, 8)),
        "expected (8, 32) torch.float32 on cpu",
    ),
    "out that is an expanded tensor to decode": (
        lambda: decode(encode(X, "e4m3"), out=torch.empty(1, 32).expand(8, 32)),
        "out overlaps itself",
    ),
    "out and a gradient": (lambda: fake_quantize(_leaf(), "e4m3", out=X.clone()), "has no gradient"),
    "encoding fp32": (lambda: encode(X, "fp32"), "fp32 has 32 bits: encode supports formats of at most 16"),
    "encoding infinity to e2m1": (lambda: encode(X / 0, "e2m1"), "e2m1 has no code for NaN"),
    "bits of another shape": (lambda: sample_weight(X, torch.ones(1, 2), 1), "(1, 1) torch.float32 on cpu"),
    "bits of another dtype": (lambda: sample_weight(X, BITS.double(), 1), "(1, 1) torch.float32 on cpu"),
    "weight that is no matrix": (lambda: sample_weight(X[0], BITS, 1), "(32,): expected a matrix"),
    "weight in float64": (lambda: sample_weight(X.double(), BITS, 1), DTYPE),
    "block of a weight": (
        lambda: sample_weight(X, BITS, 1, block=3),
        "block 3: valid values are 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    "unknown noise": (lambda: sample_weight(X, BITS, 1, noise=_any("normal")), "valid values are gaussian, uniform"),
    "negative count": (lambda: gaussian_noise(-1, 1), "count=-1: expected the number of elements"),
    "more than was drawn": (lambda: unpack_noise(WORDS, 25), "count=25: valid values are 0 to 24"),
    "unpacking floats": (lambda: unpack_noise(WORDS.float()), "expected packed noise, a vector of int32"),
}


def _any(value: object) -> Any:
    """Return the value with the type Any, so that mypy accepts a wrong argument."""
    return value


def _overlapping(x: torch.Tensor, stats: Any = False) -> object:
    return fake_quantize(x[:7], "e4m3", out=x[1:], stats=stats)


def _into_both(x: torch.Tensor, along: torch.Tensor, down: torch.Tensor) -> object:
    return fake_quantize_both(x, "e4m3", "e4m3", out=(along, down))


def _leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


@pytest.mark.parametrize("name", CASES)
def test_bad_use_is_told_what_would_be_right(name: str) -> None:
    attempt, message = CASES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attempt()


@pytest.mark.parametrize("forced", ["gpu", "CPU", "reference,cpu", " cpu"])
def test_an_unknown_backend_is_told_the_valid_ones(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_BACKEND", forced)
    with pytest.raises(
        ValueError, match=re.escape(f"FEWBITS_BACKEND={forced} is unknown: valid values are reference, cpu, cuda")
    ):
        fake_quantize(X, "e4m3")


def test_a_backend_that_is_not_there_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_BACKEND", "cuda")
    for attempt in (lambda: fake_quantize(X, "e4m3"), lambda: gaussian_noise(8, 1), lambda: mix(X, MIX)):
        with pytest.raises(ValueError, match="FEWBITS_BACKEND=cuda"):
            attempt()


def test_the_cpu_backend_refuses_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_BACKEND", "cpu")
    with pytest.raises(ValueError, match=naming("FEWBITS_BACKEND=cpu", "meta")):
        gaussian_noise(8, 1, device="meta")


def test_a_distributed_tensor_is_refused_by_name() -> None:
    class DTensor(torch.Tensor):
        """A class with the name of torch.distributed.tensor.DTensor, which itself needs a process group."""

    x = torch.ones(16, 32).as_subclass(DTensor)
    uses = (
        lambda: fake_quantize(x, "e4m3:1x16:amax"),
        lambda: mix(x, "e4m3 @ error<0.1 | bf16"),
        lambda: sample_weight(x, torch.ones(1, 1), 0),
    )
    for use in uses:
        with pytest.raises(ValueError, match="full_tensor"):
            use()
