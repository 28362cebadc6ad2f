"""Test the models of the registry: numbers of parameters, and initial parameters that depend only on the seed."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build, flops_per_token, linear_parameters, parameters

NANOS = [name for name in MODELS if name.endswith("-nano")]
BILLION, MILLION = 10**9, 10**6


GPT2 = MODELS["gpt2-124m"]


@pytest.mark.parametrize(
    ("count", "config", "unit", "printed"),
    [
        (parameters, GPT2, MILLION, "124.37"),
        (parameters, replace(GPT2, vocab=50257), MILLION, "124.34"),
        (parameters, MODELS["llama2-134m"], MILLION, "134.11"),
        (parameters, MODELS["llama2-1b"], BILLION, "1.056"),
        (parameters, MODELS["llama2-3b"], BILLION, "3.37"),
        (parameters, MODELS["llama2-70b"], BILLION, "68.98"),
        (parameters, MODELS["nemotron3-8b"], BILLION, "8.54"),
        (parameters, MODELS["hybrid-8b"], BILLION, "8.08"),
        (parameters, MODELS["hybrid-12b"], BILLION, "12.31"),
        (parameters, MODELS["nvfp4-1.2b"], 1, "1291929600"),
        (linear_parameters, GPT2, MILLION, "84.93"),
        (linear_parameters, MODELS["llama2-134m"], MILLION, "84.93"),
        (linear_parameters, MODELS["llama2-1b"], MILLION, "924.8"),
        (linear_parameters, MODELS["llama2-3b"], MILLION, "3170.9"),
        (linear_parameters, MODELS["llama2-70b-4l"], BILLION, "3.42"),
        (lambda config: parameters(config) - linear_parameters(config), MODELS["llama2-70b-4l"], BILLION, "0.52"),
        (linear_parameters, MODELS["nemotron3-8b"], BILLION, "6.442"),
        (linear_parameters, MODELS["nvfp4-1.2b"], MILLION, "754.97"),
        (parameters, MODELS["moe-1b-7b"], BILLION, "6.92"),
        (
            lambda config: flops_per_token(config, 0) // 6 + config.vocab * config.width,
            MODELS["moe-1b-7b"],
            BILLION,
            "1.28",
        ),
    ],
)
def test_a_model_has_as_many_parameters_as_published(
    count: Callable[[DecoderConfig], int], config: DecoderConfig, unit: int, printed: str
) -> None:
    decimals = len(printed.partition(".")[2])
    assert f"{count(config) / unit:.{decimals}f}" == printed


# ------------------------------------------------------------------------------------------------ the -nano models


# ------------------------------------------------------------------------------------------------ initial parameters


def bits(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().view(torch.int32) for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("name", NANOS)
def test_a_seed_decides_every_bit_and_the_global_generator_is_left_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = bits(build(MODELS[name], seed=7))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other = bits(build(MODELS[name], seed=7)), bits(build(MODELS[name], seed=8))
    assert all(torch.equal(first[parameter], second[parameter]) for parameter in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


# Model: the standard deviation of initial weights, by name; a hybrid's block has one branch, other blocks have two.
BRANCHES = ("attention.out", "ffn.up", "ffn.down")
DEVIATIONS = {
    "gpt2-nano": dict.fromkeys(("embed", "positions", "blocks.3.attention.qkv", "blocks.3.ffn.up"), 0.02)
    | dict.fromkeys(("blocks.3.attention.out", "blocks.3.ffn.down"), 0.02 / math.sqrt(12)),
    "llama2-nano": {"embed": 1.0, "head": 0.9866 / 16}  # the head is truncated at 3 deviations
    | {f"blocks.{n}.{name}": 0.02 for n in (0, 5) for name in ("attention.q", "attention.k", "attention.v", "ffn.gate")}
    | {f"blocks.{n}.{name}": 0.02 / math.sqrt(2 * (n + 1)) for n in (0, 5) for name in BRANCHES},
    "hybrid-nano": {"blocks.0.mamba.in_proj": 0.02}
    | dict.fromkeys(("blocks.0.mamba.out_proj", "blocks.1.ffn.down", "blocks.3.attention.out"), 0.02 / math.sqrt(13)),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_model_starts_as_published(name: str) -> None:
    decoder = build(MODELS[name], seed=7)
    found = {weight: float(decoder.get_parameter(f"{weight}.weight").detach().std()) for weight in DEVIATIONS[name]}
    assert found == pytest.approx(DEVIATIONS[name], rel=0.02)
    assert (decoder.head.weight is decoder.embed.weight) == (name == "gpt2-nano")
    assert name != "llama2-nano" or decoder.head.weight.abs().max() <= 3 / 16


def test_no_parameter_is_left_unfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `build` initialises every parameter: torch.empty returns NaN here."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    for name in NANOS:
        assert all(parameter.isfinite().all() for parameter in build(MODELS[name], seed=7).parameters())
