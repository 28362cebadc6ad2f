"""Test the models of the registry: numbers of parameters, and initial parameters that depend only on the seed."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build, flops_per_token, linear_parameters, model, on_meta, parameters
from tests.messages import naming

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


@pytest.mark.parametrize(("name", "mamba", "ffn", "attention"), [("hybrid-8b", 24, 24, 4), ("hybrid-12b", 28, 28, 6)])
def test_a_hybrid_has_as_many_blocks_of_each_kind_as_published(name: str, mamba: int, ffn: int, attention: int) -> None:
    pattern = MODELS[name].pattern
    assert tuple(map(pattern.count, "M-*")) == (mamba, ffn, attention)
    assert pattern.endswith("M-M-M-M-")


# ------------------------------------------------------------------------------------------------ the -nano models


@pytest.mark.parametrize("name", NANOS)
def test_every_operand_of_a_nano_model_holds_four_blocks_of_128_by_128(name: str) -> None:
    config = MODELS[name]
    for linear in on_meta(config).blocks.modules():
        if isinstance(linear, Linear):
            tokens = config.context  # tokens of a single sequence
            if linear.part == "router":
                continue
            for rows, cols in (linear.weight.shape, (tokens, linear.in_features), (tokens, linear.out_features)):
                assert min(rows, cols) >= 256
                assert math.ceil(rows / 128) * math.ceil(cols / 128) >= 4


@pytest.mark.parametrize("name", NANOS)
def test_a_nano_model_has_blocks_beyond_the_last_four(name: str) -> None:
    config = MODELS[name]
    assert config.width >= 256
    assert config.layers >= (12 if config.pattern else 6)
    assert config.vocab == 256


@pytest.mark.parametrize("name", NANOS)
def test_a_nano_model_has_its_familys_parts(name: str) -> None:
    large = {"gpt2": "gpt2-124m", "llama2": "llama2-134m", "nemotron": "nemotron3-8b", "hybrid": "hybrid-8b"}
    large["moe"] = "moe-1b-7b"
    family = MODELS[large[name.removesuffix("-nano")]]
    parts = ("activation", "norm", "positions", "rope_fraction", "tied", "bias", "fused_qkv", "init", "mamba_expand")
    assert all(getattr(MODELS[name], part) == getattr(family, part) for part in parts)


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


def test_no_two_parameters_start_alike() -> None:
    weights = [x[:256, :256] for x in bits(build(MODELS["llama2-nano"], seed=7)).values() if x.ndim == 2]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_a_deeper_model_starts_with_the_same_first_blocks() -> None:
    config = MODELS["llama2-nano"]
    shallow, deep = bits(build(config, seed=7)), bits(build(replace(config, layers=10), seed=7))
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def test_gpt2s_deeper_model_differs_in_the_scale_of_what_joins_the_residual_stream_alone() -> None:
    config = MODELS["gpt2-nano"]
    shallow, deep = build(config, seed=7), build(replace(config, layers=24), seed=7)
    for name, weight in shallow.named_parameters():
        scale = 2 if name.endswith(("out.weight", "down.weight")) else 1  # √(24 / 6), by the numbers of blocks
        torch.testing.assert_close(weight, deep.get_parameter(name) * scale, rtol=1e-6, atol=0)


def test_another_vocabulary_leaves_the_blocks_as_they_are() -> None:
    config = MODELS["nemotron-nano"]
    bytes_, words = bits(build(config, seed=7)), bits(build(replace(config, vocab=512), seed=7))
    assert all(torch.equal(bytes_[name], words[name]) for name in bytes_ if name.startswith("blocks"))


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


def test_an_unknown_name_is_answered_with_the_names() -> None:
    with pytest.raises(ValueError, match=naming("gpt3", "gpt2-124m, llama2-134m", "hybrid-nano")):
        model("gpt3")
    assert model("gpt2-nano") is MODELS["gpt2-nano"]
