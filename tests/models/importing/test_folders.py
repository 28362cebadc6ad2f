"""Test that a published Hugging Face folder loads into a decoder with transformers' logits, or is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbits.models.importing.layouts import Published
from fewbits.models.importing.sources import read_published
from fewbits.models.networks.decoder import Decoder
from tests.messages import naming
from tests.models.oracles import stirred

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "activation_function": "gelu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied, another width": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 96}),
    "llama, grouped heads": (
        "Llama",
        {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3},
    ),
    "llama, tied, with biases": (
        "Llama",
        {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "nemotron": ("Nemotron", {**SIZES, "head_dim": 16}),
    "arcee": ("Arcee", SIZES),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def publish(folder: Path, case: str, shard: str = "1GB") -> Any:
    """Save a random model of transformers to a folder by `save_pretrained`; return the model.

    case: a key of CASES. shard: the largest size of a file.
    """
    import transformers

    kind, settings = CASES[case]
    torch.manual_seed(1)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**settings)
    )
    stirred(model)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


def decoder(published: Published) -> Decoder:
    model = Decoder(published.config, torch.float32)
    model.load_state_dict(published.state())
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = publish(tmp_path / "published", case)
    ours = decoder(read_published(str(tmp_path / "published")))
    tokens = torch.randint(61, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=2e-5)


def test_shards_and_a_model_without_its_prefix_give_the_same_weights(tmp_path: Path) -> None:
    publish(tmp_path / "one", "gpt2")
    publish(tmp_path / "shards", "gpt2", shard="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    weights = load_file(tmp_path / "one" / "model.safetensors")
    (tmp_path / "bare").mkdir()
    save_file({k.removeprefix("transformer."): v for k, v in weights.items()}, tmp_path / "bare" / "model.safetensors")
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    one, *others = (read_published(str(tmp_path / name)).state() for name in ("one", "shards", "bare"))
    for other in others:
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_of_a_narrower_type_become_the_same_values_in_fp32(tmp_path: Path) -> None:
    theirs = publish(tmp_path, "arcee").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    embedding = read_published(str(tmp_path)).state()["embed.weight"]
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, theirs.model.embed_tokens.weight.float())


def test_gpt2s_other_gelu_is_named(tmp_path: Path) -> None:
    publish(tmp_path, "gpt2")
    _change(tmp_path, activation_function="gelu_new")
    assert "gelu_new" in " ".join(read_published(str(tmp_path)).notes)


# ------------------------------------------------------------------------------------------------ invalid folders


def _change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def _weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def _cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def _pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def _elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')


Q = "model.layers.1.self_attn.q_proj.weight"
# Case: a function that damages a valid folder, and the words that the error message must contain.
BAD: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing tensor": (lambda f: _weights(f, lambda w: w.pop(Q)), (Q,)),
    "tensor of no layer": (lambda f: _weights(f, lambda w: w.update({"model.extra": torch.ones(2)})), ("model.extra",)),
    "wrong shape": (lambda f: _weights(f, lambda w: w.update({Q: w[Q][:8].clone()})), (Q, "8x64", "64x64")),
    "NaN": (lambda f: _weights(f, lambda w: w[Q].fill_(torch.nan)), (Q, "NaN")),
    "whole numbers": (lambda f: _weights(f, lambda w: w.update({Q: w[Q].to(torch.int8)})), (Q, "int8")),
    "other architecture": (
        lambda f: _change(f, model_type="mamba"),
        ("mamba", "gpt2, llama, mixtral, nemotron, arcee"),
    ),
    "scaled rotations": (lambda f: _change(f, rope_parameters={"rope_type": "llama3"}), ("rope_type", "llama3")),
    "other activation": (lambda f: _change(f, hidden_act="gelu"), ("hidden_act", "gelu", "silu")),
    "biases of some layers": (lambda f: _change(f, attention_bias=True), ("mlp_bias",)),
    "heads that do not divide": (lambda f: _change(f, num_key_value_heads=3), ("kv_heads", "config.json")),
    "a size that is text": (lambda f: _change(f, hidden_size="64"), ("hidden_size", "64")),
    "no size": (lambda f: _change(f, hidden_size=None), ("hidden_size",)),
    "truncated weights": (lambda f: _cut(f / "model.safetensors", 5000), ("model.safetensors",)),
    "empty weights": (lambda f: _cut(f / "model.safetensors", 0), ("model.safetensors",)),
    "truncated configuration": (lambda f: _cut(f / "config.json", 50), ("config.json", "JSON")),
    "absurd sizes": (
        lambda f: _change(f, num_attention_heads=10**30, num_key_value_heads=10**30),
        ("configuration has 2 layers", "tensors"),
    ),
    "absurd layers": (lambda f: _change(f, num_hidden_layers=10**9), ("1000000000 layers", "tensors")),
    "a huge configuration": (lambda f: os.truncate(f / "config.json", 1 << 33), ("config.json", "refused")),
    "a pipe": (_pipe, ("config.json",)),
    "weights in another folder": (_elsewhere, ("../model.safetensors", "not the name of a safetensors file")),
    "no configuration": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ("model.safetensors", "pytorch_model.bin", "pickle"),
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(folder, "llama, grouped heads")
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_does_not_fit_is_refused_by_name(case: str, llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    spoil, named = BAD[case]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=naming(*named)) as error:
        read_published(str(tmp_path)).state()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "no such index"])
def test_a_missing_shard_is_named(name: str, tmp_path: Path) -> None:
    publish(tmp_path, "llama, grouped heads", shard="100KB")
    index = tmp_path / "model.safetensors.index.json"
    if name == "no such index":
        index.write_text("[]")
        named = index.name
    else:
        first = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
        (tmp_path / first).unlink()
        named = first
    with pytest.raises(ValueError, match=naming(named)):
        read_published(str(tmp_path))


def test_an_unknown_source_is_answered_by_what_is_known(tmp_path: Path) -> None:
    for source in (str(tmp_path / "nowhere"), "package:nothing"):
        with pytest.raises(ValueError, match=naming(source, "package:smollm2")):
            read_published(source)
