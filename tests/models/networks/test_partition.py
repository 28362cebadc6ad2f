"""Check Adam-mini's partition: it covers every parameter, with groups of rows for heads and for output neurons."""

import pytest
import torch

from fewbits.models.networks.partition import adam_mini_partition, muon_partition
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_rows_cover_each_parameter_once(name: str) -> None:
    model = on_meta(MODELS[name])
    partition = adam_mini_partition(model)
    assert list(partition) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        groups = partition[name]
        assert groups in ("element", "tensor") or sum(map(int, groups)) == parameter.shape[0]


def test_a_fused_qkv_has_queries_and_keys_by_head_and_values_by_neuron() -> None:
    model, name = on_meta(MODELS["nvfp4-1.2b"]), "blocks.0.attention.qkv.weight"
    assert adam_mini_partition(model)[name] == (128,) * (16 + 8) + (1,) * (8 * 128)
    assert muon_partition(model)[name] == (128 * 16, 128 * 8, 128 * 8)


def test_separate_queries_and_keys_go_by_head_and_the_other_linear_layers_by_neuron() -> None:
    partition = adam_mini_partition(on_meta(MODELS["llama2-nano"]))
    block = {name.removeprefix("blocks.0."): groups for name, groups in partition.items() if ".0." in name}
    assert block == {
        "attention_norm.weight": "tensor",
        "attention.q.weight": (64,) * 4,
        "attention.k.weight": (64,) * 4,
        "attention.v.weight": (1,) * 256,
        "attention.out.weight": (1,) * 256,
        "ffn_norm.weight": "tensor",
        "ffn.gate.weight": (1,) * 512,
        "ffn.up.weight": (1,) * 512,
        "ffn.down.weight": (1,) * 256,
    }


def test_muons_matrices_are_the_linear_layers_of_blocks_router_and_experts_included() -> None:
    partition = muon_partition(on_meta(MODELS["hybrid-nano"]))
    assert {name: rows for name, rows in partition.items() if name.startswith("blocks.0.")} == {
        "blocks.0.mamba.in_proj.weight": (1160,),
        "blocks.0.mamba.out_proj.weight": (256,),
    }
    partition = muon_partition(on_meta(MODELS["moe-nano"]))
    assert {
        name: rows for name, rows in partition.items() if name.startswith(("blocks.1.ffn.r", "blocks.1.ffn.experts.3"))
    } == {
        "blocks.1.ffn.router.weight": (4,),
        "blocks.1.ffn.experts.3.gate.weight": (256,),
        "blocks.1.ffn.experts.3.up.weight": (256,),
        "blocks.1.ffn.experts.3.down.weight": (256,),
    }
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=24, num_experts=3, num_hidden_layers=1)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    found = {name.partition(".mlp.")[2]: rows for name, rows in muon_partition(model).items() if ".mlp." in name}
    assert found == {"gate.weight": (3,), "experts.gate_up_proj": (48,) * 3, "experts.down_proj": (64,) * 3}


def test_mambas_linear_layers_go_by_neuron_and_the_rest_of_it_by_tensor() -> None:
    partition = adam_mini_partition(on_meta(MODELS["hybrid-nano"]))
    mamba = {name.rpartition("blocks.0.mamba.")[2]: g for name, g in partition.items() if ".0.mamba." in name}
    rows = {name: groups for name, groups in mamba.items() if not isinstance(groups, str)}
    assert rows == {"in_proj.weight": (1,) * 1160, "out_proj.weight": (1,) * 256}
    assert {name for name, groups in mamba.items() if groups == "element"} == {"conv_bias", "dt_bias"}
    assert {name for name, groups in mamba.items() if groups == "tensor"} == {
        "conv_weight",
        "A_log",
        "D",
        "norm_weight",
    }


def test_a_foreign_llama_is_partitioned_like_ours() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    theirs = sorted(map(str, adam_mini_partition(LlamaForCausalLM(config)).values()))
    assert theirs == sorted(map(str, adam_mini_partition(on_meta(MODELS["llama2-nano"])).values()))
