"""Check that a decoder that is converted to a model of transformers computes the same logits and gradients there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fewbits.models.importing.families import family_of, to_huggingface
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from tests.messages import naming
from tests.models.oracles import assert_equal_results, small, stirred

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-124m", {}),
    "gpt2 with biases, untied": ("gpt2-124m", {"bias": True, "tied": False}),
    "llama": ("llama2-134m", {"kv_heads": 2, "rope_theta": 500.0}),
    "llama, fused, tied": ("llama2-134m", {"fused_qkv": True, "tied": True, "bias": True, "head_dim": 32}),
    "nemotron": ("nemotron3-8b", {"kv_heads": 2}),
    "nemotron, whole heads": ("nemotron3-8b", {"rope_fraction": 1.0}),
    "arcee": ("nvfp4-1.2b", {"kv_heads": 2}),
    "mixtral": ("moe-1b-7b", {"kv_heads": 2, "experts": 4, "active_experts": 2, "balance": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    import transformers

    name, changes = CASES[case]
    config = small(name, **changes)
    ours = build(config, seed=1, compute_dtype=torch.float32)
    stirred(ours)
    content, weights = to_huggingface(config, ours.state_dict(), end=0)
    kind = getattr(transformers, content["architectures"][0])
    if config.experts:  # transformers renames and joins the tensors of a published file
        (tmp_path / "config.json").write_text(json.dumps(content))
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        theirs, report = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        assert_equal_results(theirs, ours)
        return
    theirs = kind(kind.config_class(**{k: v for k, v in content.items() if k not in ("model_type", "architectures")}))
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if config.tied else set(), [])
    theirs.tie_weights()
    assert_equal_results(theirs, ours)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("hybrid")])
def test_every_transformer_of_the_papers_has_a_class_there(name: str) -> None:
    assert family_of(MODELS[name]).architecture.endswith(("LMHeadModel", "ForCausalLM"))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        (
            "hybrid-8b",
            {"layers": 4, "pattern": "M-*M", "mamba_groups": 2, "mamba_head_dim": 16},
            ("hybrid-8b", "Mamba-2"),
        ),
        ("nemotron3-8b", {"layers": 2, "pattern": "*-"}, ("nemotron3-8b", "*-")),
        ("gpt2-124m", {"kv_heads": 2}, ("gpt2-124m", "kv_heads")),
        ("llama2-134m", {"rope_fraction": 0.5}, ("llama2-134m", "rope", "50%")),
        ("gpt2-124m", {"activation": "relu2"}, ("gpt2-124m", "relu2", "layernorm")),
        ("moe-nano", {"shared_ffn": 32}, ("moe-nano", "shared_ffn")),
        ("moe-nano", {"activation": "relu2"}, ("moe-nano", "relu2", "experts")),
    ],
)
def test_a_model_that_transformers_lacks_is_refused(name: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        family_of(small(name, **changes))
