"""Test the models of the registry: numbers of parameters, and initial parameters that depend only on the seed."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build, linear_parameters, model, on_meta, parameters
from tests.messages import naming

NANOS = [name for name in MODELS if name.endswith("-nano")]
BILLION, MILLION = 10**9, 10**6


@pytest.mark.parametrize(
    ("name", "unit", "printed"),
    [
        ("gpt2-124m", MILLION, "124.37"),
        ("llama2-134m", MILLION, "134.11"),
        ("llama2-1b", BILLION, "1.056"),
        ("llama2-3b", BILLION, "3.37"),
        ("llama2-70b", BILLION, "68.98"),
        ("nemotron3-8b", BILLION, "8.54"),
        ("hybrid-8b", BILLION, "8.08"),
        ("hybrid-12b", BILLION, "12.31"),
    ],
)
def test_a_model_has_as_many_parameters_as_published(name: str, unit: int, printed: str) -> None:
    decimals = len(printed.partition(".")[2])
    assert f"{parameters(MODELS[name]) / unit:.{decimals}f}" == printed


def test_nvfp4_has_exactly_the_parameters_that_its_replication_reports() -> None:
    assert parameters(MODELS["nvfp4-1.2b"]) == 1_291_929_600


def test_gpt2_with_the_unpadded_vocabulary_has_124_34_million() -> None:
    assert f"{parameters(replace(MODELS['gpt2-124m'], vocab=50257)) / MILLION:.2f}" == "124.34"


@pytest.mark.parametrize(
    ("name", "unit", "printed"),
    [
        ("gpt2-124m", MILLION, "84.93"),
        ("llama2-134m", MILLION, "84.93"),
        ("llama2-1b", MILLION, "924.8"),
        ("llama2-3b", MILLION, "3170.9"),
        ("llama2-70b-4l", BILLION, "3.42"),
        ("nemotron3-8b", BILLION, "6.442"),
        ("nvfp4-1.2b", MILLION, "754.97"),
    ],
)
def test_linear_parameters_are_those_of_the_blocks_linear_layers(name: str, unit: int, printed: str) -> None:
    decimals = len(printed.partition(".")[2])
    assert f"{linear_parameters(MODELS[name]) / unit:.{decimals}f}" == printed


def test_four_layers_of_llama2_70b_are_half_a_billion_embeddings_more() -> None:
    config = MODELS["llama2-70b-4l"]
    assert f"{(parameters(config) - linear_parameters(config)) / BILLION:.2f}" == "0.52"


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
            for rows, cols in (linear.weight.shape, (tokens, linear.in_features), (tokens, linear.out_features)):
                assert min(rows, cols) >= 256
                assert math.ceil(rows / 128) * math.ceil(cols / 128) >= 4


@pytest.mark.parametrize("name", NANOS)
def test_a_nano_model_has_blocks_beyond_the_last_four(name: str) -> None:
    config = MODELS[name]
    assert config.width >= 256
    assert config.layers >= (12 if config.pattern else 6)
    assert config.vocab == 256


def test_the_nano_hybrid_ends_as_the_large_ones_and_has_attention_inside() -> None:
    pattern = MODELS["hybrid-nano"].pattern
    assert pattern.endswith("M-M-M-M-")
    assert "*" in pattern[2:-8]


@pytest.mark.parametrize("name", NANOS)
def test_a_nano_model_has_its_familys_parts(name: str) -> None:
    large = {"gpt2": "gpt2-124m", "llama2": "llama2-134m", "nemotron": "nemotron3-8b", "hybrid": "hybrid-8b"}
    family = MODELS[large[name.removesuffix("-nano")]]
    parts = ("activation", "norm", "positions", "rope_fraction", "tied", "bias", "fused_qkv", "init", "mamba_expand")
    assert all(getattr(MODELS[name], part) == getattr(family, part) for part in parts)


def test_depth_is_a_setting() -> None:
    deep = build(replace(MODELS["nemotron-nano"], layers=10), seed=1)
    assert len(deep.blocks) == 10


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


def deviation(decoder: Decoder, name: str) -> float:
    return float(decoder.get_parameter(name).detach().std())


def test_gpt2_starts_as_published() -> None:
    decoder = build(MODELS["gpt2-nano"], seed=7)
    for name in ("embed", "positions", "blocks.3.attention.qkv", "blocks.3.ffn.up"):
        assert deviation(decoder, f"{name}.weight") == pytest.approx(0.02, rel=0.02)
    for name in ("blocks.3.attention.out", "blocks.3.ffn.down"):
        assert deviation(decoder, f"{name}.weight") == pytest.approx(0.02 / math.sqrt(12), rel=0.02)
    assert decoder.head.weight is decoder.embed.weight


def test_llama_starts_as_published() -> None:
    decoder = build(MODELS["llama2-nano"], seed=7)
    assert deviation(decoder, "embed.weight") == pytest.approx(1.0, rel=0.02)
    assert deviation(decoder, "head.weight") == pytest.approx(0.9866 / 16, rel=0.02)  # truncated at 3 deviations
    assert decoder.head.weight.abs().max() <= 3 / 16
    for number in (0, 5):
        for name in ("attention.q", "attention.k", "attention.v", "ffn.gate"):
            assert deviation(decoder, f"blocks.{number}.{name}.weight") == pytest.approx(0.02, rel=0.02)
        for name in ("attention.out", "ffn.up", "ffn.down"):
            expected = 0.02 / math.sqrt(2 * (number + 1))
            assert deviation(decoder, f"blocks.{number}.{name}.weight") == pytest.approx(expected, rel=0.02)


def test_a_hybrid_scales_by_one_branch_to_a_block() -> None:
    """Check that the deviation of a hybrid's output layers is divided by √blocks, as each block has one branch."""
    decoder = build(MODELS["hybrid-nano"], seed=7)
    for name in ("blocks.0.mamba.out_proj", "blocks.1.ffn.down", "blocks.3.attention.out"):
        assert deviation(decoder, f"{name}.weight") == pytest.approx(0.02 / math.sqrt(13), rel=0.02)
    assert deviation(decoder, "blocks.0.mamba.in_proj.weight") == pytest.approx(0.02, rel=0.02)


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
