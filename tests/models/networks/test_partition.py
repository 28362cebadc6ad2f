"""Check Adam-mini's partition: it covers every parameter, with groups of rows for heads and for output neurons."""

import pytest
from torch import nn

from fewbits.models.networks.partition import adam_mini_partition
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta
from tests.messages import naming


@pytest.mark.parametrize("kind", ["adam-mini", "adam-mini-1.0"])
@pytest.mark.parametrize("name", MODELS)
def test_groups_of_rows_cover_each_parameter_once(name: str, kind: str) -> None:
    model = on_meta(MODELS[name])
    partition = adam_mini_partition(model, kind)
    assert list(partition) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        groups = partition[name]
        assert groups in ("element", "tensor") or sum(map(int, groups)) == parameter.shape[0]


def test_a_fused_qkv_has_queries_and_keys_by_head_and_values_by_neuron() -> None:
    model, name = on_meta(MODELS["nvfp4-1.2b"]), "blocks.0.attention.qkv.weight"
    assert adam_mini_partition(model)[name] == (128,) * (16 + 8) + (1,) * (8 * 128)
    assert adam_mini_partition(model, "adam-mini-1.0")[name] == (128,) * (16 + 8) + (8 * 128,)


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


def test_embeddings_and_head_go_by_row_and_earlier_by_element() -> None:
    model = on_meta(MODELS["llama2-nano"])
    assert adam_mini_partition(model)["head.weight"] == (1,) * 256
    assert adam_mini_partition(model, "adam-mini-1.0")["head.weight"] == "element"
    model = on_meta(MODELS["gpt2-nano"])
    for name in ("embed.weight", "positions.weight"):
        assert set(adam_mini_partition(model)[name]) == {1}
        assert adam_mini_partition(model, "adam-mini-1.0")[name] == "element"


def test_earlier_values_outputs_mlp_and_biases_go_by_tensor() -> None:
    partition = adam_mini_partition(on_meta(MODELS["gpt2-nano"]), "adam-mini-1.0")
    block = {name: groups for name, groups in partition.items() if ".0." in name}
    assert {name for name, groups in block.items() if groups != "tensor"} == {"blocks.0.attention.qkv.weight"}


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


def test_a_module_without_attention_goes_by_neuron() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    assert adam_mini_partition(model) == {
        "0.weight": (1,) * 5,
        "0.bias": "element",
        "1.weight": "tensor",
        "1.bias": "element",
    }


@pytest.mark.parametrize("head_dim", [None, 0, 4])
def test_queries_without_a_heads_dimension_are_refused(head_dim: int | None) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim, self.q_proj = head_dim, nn.Linear(4, 6)

    with pytest.raises(ValueError, match=naming("q_proj", 6, head_dim)):
        adam_mini_partition(nn.Sequential(Attention()))


def test_an_attentions_output_is_no_head_and_other_optimizers_have_no_partition() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(4, 6, bias=False)

    attention = Layer()
    attention.head_dim = 2  # type: ignore[assignment]
    model = nn.ModuleDict({"layer": Layer(), "attention": attention})
    partition = adam_mini_partition(model, "adam-mini-1.0")
    assert partition == {"layer.output.weight": "element", "attention.output.weight": "tensor"}
    with pytest.raises(ValueError, match=r"'adam-mini-2': valid values are adam-mini, adam-mini-1\.0"):
        adam_mini_partition(model, "adam-mini-2")
