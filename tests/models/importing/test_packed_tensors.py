"""Test packed checkpoints: others decode the bits of fprop.w, and an import reads back what an export wrote."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import Packed, decode
from fewbits.kernels.packing import swizzle
from fewbits.models.importing.families import Weights, to_huggingface
from fewbits.models.importing.gguf import write_gguf
from fewbits.models.importing.packed_tensors import FORMATS, file_metadata, packed_weight, to_packed
from fewbits.models.importing.sources import read_published
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import build
from fewbits.models.quantize import quantize
from fewbits.models.recipe import Recipe
from tests.messages import naming
from tests.models.oracles import TOKENS, small, stirred

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-124m", {}),
    "llama": ("llama2-134m", {"kv_heads": 2}),
    "llama, fused, tied": ("llama2-134m", {"fused_qkv": True, "bias": True, "tied": True}),
    "nemotron": ("nemotron3-8b", {"kv_heads": 2}),
    "mixtral": ("moe-1b-7b", {"experts": 4, "active_experts": 2}),
}
NVFP4, MXFP4 = "e2m1:16x16:nvfp4", "e2m1:32x32:mx"
WEIGHTS = (NVFP4, "e2m1:1x16:fouroversix:stochastic", MXFP4)


class Trained:
    """A small model with a recipe whose first block's output layer of attention is kept, and its packed weights."""

    def __init__(self, family: str, weights: str, dtype: torch.dtype = torch.bfloat16, **others: int) -> None:
        name, changes = FAMILIES[family]
        self.config: DecoderConfig = small(name, **changes, **others)
        model = build(self.config, seed=1, compute_dtype=dtype)
        stirred(model)
        self.state: Weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        fprop = {"w": weights} | ({"x": weights} if "rht" in weights else {})
        recipe: dict[str, Any] = {"name": "packed" if weights != "high" else "bf16", "fprop": fprop}
        recipe |= {"keep": {"names": ["blocks.0.attention.out"]}}
        quantization = quantize(model, Recipe.from_dict(recipe), seed=3)
        quantization.begin(7)
        self.packed: dict[str, Packed] = {}
        self.fprop: Weights = {}
        for layer in quantization.layers:
            if (weight := packed_weight(layer, quantization.context, dtype)) is not None:
                self.packed[f"{layer.name}.weight"] = weight
                read = layer.quantize_weight_for(0, quantization.context, dtype, sampled=False)
                assert isinstance(read, Tensor)
                self.fprop[f"{layer.name}.weight"] = read.float()

    @property
    def by_name(self) -> Weights:
        """The weights that fprop reads by transformers' names."""
        return to_huggingface(self.config, {**self.state, **self.fprop})[1]

    def write(self, folder: Path, format_: str) -> tuple[dict[str, Any], list[str]]:
        content, weights, notes = to_packed(self.config, self.state, self.packed, format_, end=0)
        (folder / "config.json").write_text(json.dumps(content))
        metadata = file_metadata(format_, weights, content["dtype"])
        save_file(weights, folder / "model.safetensors", {"format": "pt", **metadata})
        return content["quantization_config"], notes


def assert_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.dtype == expected.dtype, name
    assert torch.equal(actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)), name


@pytest.mark.parametrize(
    ("format_", "weights"),
    [(name, weights) for name in FORMATS for weights in WEIGHTS if name == "compressed-tensors" or weights != MXFP4],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_import_reads_the_bits_of_fprop(tmp_path: Path, format_: str, family: str, weights: str) -> None:
    trained = Trained(family, weights)
    trained.write(tmp_path, format_)
    published = read_published(str(tmp_path))
    read = to_huggingface(published.config, published.state())[1]
    assert read.keys() == trained.by_name.keys()
    for name, value in trained.by_name.items():
        assert_bits(read[name], value, name)
    assert all(torch.equal(decode(weight).float(), trained.fprop[name]) for name, weight in trained.packed.items())


@pytest.mark.parametrize("weights", [NVFP4, MXFP4])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_gguf_decodes_fprop_and_an_import_reads_it(tmp_path: Path, family: str, weights: str) -> None:
    trained, path = Trained(family, weights, ffn=128), tmp_path / "model.gguf"
    write_gguf(path, trained.config, trained.state, trained.packed)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds["blk.1.ffn_up.weight"] == ("NVFP4" if weights == NVFP4 else "MXFP4")
    assert kinds["blk.0.attn_output.weight"] == "F32"  # a kept layer
    published = read_published(str(path))  # the package gguf decodes the tensors
    read = to_huggingface(published.config, published.state())[1]
    exact = {name: decode(replace(weight, dtype=torch.float32)) for name, weight in trained.packed.items()}
    expected = to_huggingface(trained.config, {**trained.state, **exact})[1]
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        if "norm.weight" in name or "layernorm.weight" in name:  # Nemotron's are stored plus 1
            torch.testing.assert_close(read[name], value, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(read[name], value), name  # the package's zeros are positive
    for name, value in trained.fprop.items():
        assert torch.equal(exact[name].bfloat16().float(), value), name


@pytest.mark.parametrize("weights", [NVFP4, MXFP4])
def test_the_bytes_of_compressed_tensors(tmp_path: Path, weights: str) -> None:
    trained = Trained("llama, fused, tied", weights)
    config, notes = trained.write(tmp_path, "compressed-tensors")
    stored = load_file(tmp_path / "model.safetensors")
    layer, ours = "model.layers.1.self_attn.v_proj", trained.packed["blocks.1.attention.qkv.weight"]
    assert ours.scales is not None
    rows = slice(128, 192)  # after 64 rows of q and 64 of k
    assert torch.equal(stored[f"{layer}.weight_packed"], ours.codes[rows])
    tall = ours.quantizer.block.rows or 1
    by_row = ours.scales.repeat_interleave(tall, 0)[rows]
    assert torch.equal(stored[f"{layer}.weight_scale"].view(torch.uint8), by_row)
    even, odd = ours.codes[128, 0] & 15, ours.codes[128, 0] >> 4
    values = torch.tensor(TABLE["e2m1"].values())[torch.stack([even, odd]).long()]
    assert torch.equal(values.sign(), trained.fprop["blocks.1.attention.qkv.weight"][128, :2].sign())
    group = config["config_groups"]["group_0"]["weights"]
    if weights == NVFP4:
        assert (config["format"], group["group_size"], group["strategy"]) == (
            "nvfp4-pack-quantized",
            16,
            "tensor_group",
        )
        scales = [stored[f"model.layers.1.self_attn.{name}_proj.weight_global_scale"] for name in "qkv"]
        assert scales[0].shape == (1,)
        assert torch.equal(scales[0], scales[1])
        assert torch.equal(scales[0], scales[2])
        assert ours.group_scales is not None
        torch.testing.assert_close(scales[0] * ours.group_scales, torch.ones(1), rtol=1e-5, atol=0)
    else:
        assert (config["format"], group["group_size"], group["scale_dtype"]) == (
            "mxfp4-pack-quantized",
            32,
            "torch.uint8",
        )
    assert "model.layers.0.self_attn.o_proj" in config["ignore"]
    assert "lm_head" in config["ignore"]
    assert not any(layer.startswith("model.layers.1") for layer in config["ignore"])
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float32
    assert any("gate_proj, up_proj" in note for note in notes) == (weights == NVFP4)


def test_fp32_values_may_differ_in_the_last_bit_and_the_export_says_so(tmp_path: Path) -> None:
    trained = Trained("llama", NVFP4, torch.float32)
    _, notes = trained.write(tmp_path, "compressed-tensors")
    assert any("last bit of float32" in note for note in notes)
    read = read_published(str(tmp_path)).state()
    for name, value in trained.fprop.items():
        torch.testing.assert_close(read[name], value, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ("e4m3:128x128:amax", ("e4m3:128x128:amax", "e2m1:1x16:nvfp4")),
        ("e2m1:1x32:nvfp4", ("e2m1:1x32:nvfp4", "e2m1:1x16:nvfp4")),
        ("e2m1:1x16:nvfp4:rht16", ("rotation", "rht16")),
        ("e4m3:128x128:amax @ error<0.045 | bf16", ("mixture", "e4m3:128x128:amax")),
        ("high", ("no weight", "huggingface")),
    ],
)
def test_weights_that_a_format_cannot_store_are_refused(tmp_path: Path, weights: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        Trained("llama", weights).write(tmp_path, "compressed-tensors")


@pytest.mark.parametrize(
    ("tensor", "value", "named"),
    [
        ("weight_scale", None, ("q_proj", "weight_scale")),
        ("weight_global_scale", None, ("q_proj", "weight_global_scale")),
        ("weight_scale", torch.ones(64, 3, dtype=torch.uint8), ("q_proj.weight_scale", "[64, 3]", "[64, 4]")),
    ],
)
def test_a_damaged_packed_weight_is_refused(
    tmp_path: Path, tensor: str, value: Tensor | None, named: tuple[str, ...]
) -> None:
    Trained("llama", NVFP4).write(tmp_path, "compressed-tensors")
    stored = load_file(tmp_path / "model.safetensors")
    del stored[f"model.layers.0.self_attn.q_proj.{tensor}"]
    if value is not None:
        stored[f"model.layers.0.self_attn.q_proj.{tensor}"] = value
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=naming(*named)):
        read_published(str(tmp_path)).state()


def test_swizzled_scales_of_torchao_are_read(tmp_path: Path) -> None:
    trained = Trained("llama", NVFP4)
    trained.write(tmp_path, "torchao")
    stored = load_file(tmp_path / "model.safetensors")
    for name, scales in stored.items():
        if name.endswith("._weight_scale"):
            down, across = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
            blocked = torch.zeros(down * across * 512, dtype=torch.uint8)
            blocked[swizzle(scales.shape[0], scales.shape[1], scales.device)] = scales.view(torch.uint8)
            stored[name] = blocked.view(32 * down, 16 * across).view(scales.dtype)
    save_file(stored, tmp_path / "model.safetensors")
    read = read_published(str(tmp_path)).state()
    assert all(torch.equal(read[name], value) for name, value in trained.fprop.items())


def test_an_unknown_packed_format_is_refused(tmp_path: Path) -> None:
    Trained("llama", NVFP4).write(tmp_path, "compressed-tensors")
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"]["format"] = "pack-quantized"
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=naming("pack-quantized", "compressed-tensors nvfp4")):
        read_published(str(tmp_path))


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_modelopt_decodes_fprop(tmp_path: Path, family: str) -> None:
    package = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    trained = Trained(family, NVFP4)
    config, _ = trained.write(tmp_path, "modelopt")
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    stored = load_file(tmp_path / "model.safetensors")
    packed = [name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")]
    assert len(packed) >= len(trained.packed)
    for name in packed:
        codes, expected = stored[name], trained.by_name[name]
        shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
        scales = {"scale": stored[f"{name}_scale"], "double_scale": stored[f"{name}_scale_2"]}
        tensor = package.NVFP4QTensor(shape, torch.bfloat16, codes)
        value = tensor.dequantize(torch.bfloat16, **scales, block_sizes={-1: 16}).float()
        assert torch.equal(value.mT if family == "gpt2" else value, expected), name  # its zeros are positive


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_torchao_decodes_fprop_and_transformers_computes_with_it(tmp_path: Path, family: str) -> None:
    package = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    from transformers import AutoModelForCausalLM

    trained = Trained(family, NVFP4)
    _, notes = trained.write(tmp_path, "torchao")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors, left = package.unflatten_tensor_state_dict(load_file(tmp_path / "model.safetensors"), metadata)
    assert not left
    packed = {name: value for name, value in tensors.items() if type(value) is not Tensor}
    assert len(packed) >= len(trained.packed)
    for name, value in packed.items():
        decoded = value.dequantize().float()
        assert torch.equal(decoded.mT if family == "gpt2" else decoded, trained.by_name[name]), name

    if any("transformers" in note for note in notes):
        assert family in ("gpt2", "mixtral")
        return
    content, plain = to_huggingface(trained.config, {**trained.state, **trained.fprop}, 0)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(content))
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    x = torch.randint(61, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (tmp_path, tmp_path / "plain")
    ]
    theirs, expected = (model(x).logits for model in models)
    assert torch.equal(theirs, expected)


@pytest.mark.deep
@pytest.mark.parametrize("weights", [NVFP4, MXFP4])
@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_decodes_fprop_and_transformers_computes_our_logits(
    tmp_path: Path, family: str, weights: str
) -> None:
    package = pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    trained = Trained(family, weights)
    config, notes = trained.write(tmp_path, "compressed-tensors")
    stored, transposed = load_file(tmp_path / "model.safetensors"), family == "gpt2"
    kind = package.compressors.BaseCompressor.get_value_from_registry(config["format"])
    scheme = package.quantization.QuantizationScheme(**config["config_groups"]["group_0"])
    packed = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    assert len(packed) >= len(trained.packed)
    for layer in packed:
        parts = {name.rpartition(".")[2]: value for name, value in stored.items() if name.rpartition(".")[0] == layer}
        value = kind.decompress(parts, scheme)["weight"].float()
        assert_bits(value.mT if transposed else value, trained.by_name[f"{layer}.weight"], layer)

    def load() -> Any:
        quantization = CompressedTensorsConfig(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=quantization)

    if transposed:
        assert any("Conv1D" in note for note in notes)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            load()
        return
    ours = build(trained.config, seed=1, compute_dtype=torch.float32)
    ours.load_state_dict({**trained.state, **trained.fprop})
    x = torch.randint(61, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, logits = load()(x).logits, ours(x)
    left_out = any("tensor scale of experts" in note for note in notes)
    rtol, atol = (0.02, 0.02) if family == "mixtral" else (1e-4, 2e-5)  # it computes experts in BF16
    assert torch.allclose(theirs, logits, rtol=rtol, atol=atol) != left_out
