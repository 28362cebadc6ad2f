"""Build pairs of a model of transformers and a decoder of fewbits with the same weights, to compare their results.

Each function in ORACLES returns such a pair; the decoder computes in FP32. The weights are converted: parameters have
other names, transformers' GPT-2 has transposed matrices, and the rows of W_q and W_k have another order, because
transformers' RoPE rotates the dimensions (i, i + n/2) together and fewbits' RoPE (2i, 2i + 1). transformers takes
seconds to import, so the functions import it when they are called.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build

TOKENS = 24
Oracle = tuple[nn.Module, Decoder]
SMALL = {"vocab": 61, "width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 96, "context": 32}


def small(name: str, **changes: object) -> DecoderConfig:
    """Return the configuration of a model of the registry at a tiny size. changes: further fields to replace."""
    return replace(MODELS[name], **{**SMALL, **changes})  # type: ignore[arg-type]


def gpt2() -> Oracle:
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61,
            n_positions=32,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_inner=96,
            activation_function="gelu",
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )
    names = {
        "transformer.wte.weight": "embed.weight",
        "transformer.wpe.weight": "positions.weight",
        "transformer.ln_f": "norm",
        "transformer.h.": "blocks.",
        "ln_1": "attention_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "ffn.up",
        "mlp.c_proj": "ffn.down",
    }
    weights = {
        _renamed(name, names): value.mT if "c_" in name and value.ndim == 2 else value
        for name, value in _stirred(theirs).items()
    }
    return theirs, _ours(small("gpt2-124m", bias=True), weights)


def llama() -> Oracle:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            max_position_embeddings=32,
        )
    )
    names = {
        "model.embed_tokens": "embed",
        "model.norm": "norm",
        "lm_head": "head",
        "model.layers.": "blocks.",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.q",
        "self_attn.k_proj": "attention.k",
        "self_attn.v_proj": "attention.v",
        "self_attn.o_proj": "attention.out",
        "mlp.gate_proj": "ffn.gate",
        "mlp.up_proj": "ffn.up",
        "mlp.down_proj": "ffn.down",
    }
    weights = {_renamed(name, names): value for name, value in _stirred(theirs).items()}
    for name in weights:
        if name.endswith((".q.weight", ".k.weight")):
            weights[name] = neighbours(weights[name], head_dim=16, rotated=16)
    return theirs, _ours(small("llama2-134m", kv_heads=2), weights)


def nemotron() -> Oracle:
    from transformers import NemotronConfig, NemotronForCausalLM

    theirs = NemotronForCausalLM(
        NemotronConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
    )
    names = {
        "model.embed_tokens": "embed",
        "model.norm": "norm",
        "lm_head": "head",
        "model.layers.": "blocks.",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.out",
        "mlp.up_proj": "ffn.up",
        "mlp.down_proj": "ffn.down",
    }
    weights = {_renamed(name, names): value for name, value in _stirred(theirs).items()}
    for block in ("blocks.0", "blocks.1"):
        q, k, v = (weights.pop(f"{block}.self_attn.{part}_proj.weight") for part in "qkv")
        q, k = (neighbours(weight, head_dim=16, rotated=8) for weight in (q, k))
        weights[f"{block}.attention.qkv.weight"] = torch.cat((q, k, v))
    return theirs, _ours(small("nemotron3-8b"), weights)


def hybrid() -> Oracle:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    theirs = NemotronHForCausalLM(
        NemotronHConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=96,
            layers_block_type=["mamba", "mlp", "attention", "mamba"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=32,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=8,
            conv_kernel=4,
            chunk_size=16,
            time_step_min=1e-30,  # transformers bounds Δ from below, which published Mamba-2 code and fewbits do not do
            mlp_hidden_act="relu2",
        )
    )
    names = {
        "model.embeddings": "embed",
        "model.norm_f": "norm",
        "lm_head": "head",
        "model.layers.": "blocks.",
    }
    pattern = "M-*M"
    mixers = {"M": "mamba", "-": "ffn", "*": "attention"}
    parts = {
        "up_proj": "up",
        "down_proj": "down",
        "o_proj": "out",
        "mixer.norm.weight": "mixer.norm_weight",
        "conv1d.weight": "conv_weight",
        "conv1d.bias": "conv_bias",
    }
    weights = {_renamed(name, names): value for name, value in _stirred(theirs).items()}
    for number, letter in enumerate(pattern):
        block, mixer = f"blocks.{number}", mixers[letter]
        for name in [name for name in weights if name.startswith(f"{block}.")]:
            ours = _renamed(name, parts).replace(f"{block}.norm", f"{block}.{mixer}_norm").replace("mixer", mixer)
            weights[ours] = weights.pop(name)
        if letter == "M":
            weights[f"{block}.mamba.conv_weight"] = weights[f"{block}.mamba.conv_weight"].squeeze(1).mT
        if letter == "*":
            qkv = [weights.pop(f"{block}.attention.{part}_proj.weight") for part in "qkv"]
            weights[f"{block}.attention.qkv.weight"] = torch.cat(qkv)
    mamba = {"mamba_groups": 2, "mamba_state": 8, "mamba_head_dim": 16}
    return theirs, _ours(small("hybrid-8b", layers=4, pattern=pattern, kv_heads=2, **mamba), weights)


ORACLES = {oracle.__name__: oracle for oracle in (gpt2, llama, nemotron, hybrid)}


def neighbours(weight: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Reorder the rows of W_q or W_k from RoPE on the pairs (i, i + n/2) to RoPE on the pairs (2i, 2i + 1)."""
    order = torch.arange(head_dim)
    order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    return weight.view(-1, head_dim, weight.shape[-1])[:, order].flatten(0, 1)


def _stirred(model: nn.Module) -> dict[str, Tensor]:
    """Add noise to all parameters of a model, and return the parameters by name.

    With this noise, an error in the conversion of biases and norms changes the results.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _renamed(name: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def _ours(config: DecoderConfig, weights: dict[str, Tensor]) -> Decoder:
    model = build(config, seed=0, compute_dtype=torch.float32)
    if config.tied:
        weights["head.weight"] = weights["embed.weight"]
    model.load_state_dict(weights)
    return model
