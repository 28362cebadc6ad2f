"""Test the layer table: the quantizer of each operand slot, or the reason why a layer stays in high precision."""

import pytest
import torch
from torch import nn

from fewbits.models.hooks import parse
from fewbits.models.layer_table import bits_per_element, layer_table
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import quantize
from fewbits.models.recipe import SLOTS, Recipe
from tests.models.oracles import small

pytest.importorskip("pandas")

E4M3 = "e4m3:16x16:amax"
FORWARD = {"fprop": {"x": E4M3, "w": E4M3}}


def test_each_layer_has_its_quantizers_or_the_reason_why_not() -> None:
    model = on_meta(small("llama2-134m", layers=4))
    keep = {"first": 1, "parts": ["down"], "names": ["blocks.2.attention.*"], "by": "bf16"}
    quantize(model, Recipe.from_dict({**FORWARD, "keep": keep, "sampler": {"kind": "gaussws", "parts": ["up"]}}))
    table = layer_table(model).set_index("layer")
    assert len(table) == 4 * 7 + 2
    up = table.loc["blocks.3.ffn.up"]
    assert [*up[["block", "part", "out", "in"]]] == [3, "up", 96, 64]
    assert [up[slot] for slot in SLOTS] == [E4M3, E4M3, "high", "high", "high", "high"]
    assert (up["sampler"], up["why"]) == ("gaussws", "")
    assert table.loc["blocks.0.ffn.down", "why"] == "keep.first=1 and keep.parts=down"
    assert table.loc["blocks.2.attention.q", "why"] == "keep.names=blocks.2.attention.*"
    assert {table.loc["blocks.2.attention.q", slot] for slot in SLOTS} == {"bf16"}
    assert (table.loc["head", "why"], table.loc["embed", "why"]) == ("head", "embedding")
    assert {table.loc["head", slot] for slot in SLOTS} == {"high"}


def test_it_takes_any_model_and_the_last_blocks_are_named() -> None:
    layers = [nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2)]
    model = nn.Sequential(*layers)
    assert set(layer_table(model)["why"]) == {"the model is not quantized", "inside nn.MultiheadAttention"}
    quantize(model, Recipe.from_dict({**FORWARD, "keep": {"last": 1}}))
    table = layer_table(model).set_index("layer")
    assert table.loc["1.linear1", "why"] == "keep.last=1"
    assert table.loc["0.linear1", "why"] == ""
    assert table.loc["0.self_attn.out_proj", "why"] == "inside nn.MultiheadAttention"
    with torch.no_grad():
        assert model(torch.zeros(3, 1, 16)).shape == (3, 1, 16)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("e2m1:1x16:nvfp4:stochastic", (4.5, 4.5)),
        ("e4m3:1x32:e8m0", (8.25, 8.25)),
        ("e4m3:tensor:amax", (8, 8)),
        ("e4m3:32x32:gam @ error<0.05 | bf16", (8 + 8 / 1024, 16)),
        ("e2m1:1x32:e8m0 > e4m3:1x32:e8m0", (8.25, 8.25)),
    ],
)
def test_an_element_has_its_share_of_the_blocks_scale(text: str, bits: tuple[float, float]) -> None:
    assert bits_per_element(parse(text)) == bits
