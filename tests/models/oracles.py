"""Compare models of transformers and decoders of fewbits with the same weights."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build

TOKENS = 24
SMALL = {"vocab": 61, "width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 96, "context": 32}


def small(name: str, **changes: object) -> DecoderConfig:
    """Return the configuration of a model of the registry at a tiny size. changes: further fields to replace."""
    return replace(MODELS[name], **{**SMALL, **changes})  # type: ignore[arg-type]


def assert_equal_results(theirs: nn.Module, ours: Decoder) -> None:
    """Compare logits and gradients of a model of transformers and of a decoder that have the same weights."""
    x, y = (torch.randint(61, (2, TOKENS), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = theirs.eval()(x).logits
    assert expected.std() > 0.5  # the logits differ clearly, so the comparison can fail
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=2e-5)

    # Compare the embedding's gradient by element, because it depends on all layers, and the norm of the whole gradient.
    their_gradients = gradients(theirs, nn.functional.cross_entropy(expected.flatten(0, 1), y.flatten()))
    our_gradients = gradients(ours, ours.loss(x, y))
    embedding = next(iter(their_gradients.values()))  # the first parameter of both models
    torch.testing.assert_close(our_gradients["embed.weight"], embedding, rtol=1e-3, atol=1e-6)
    biased = any(name.endswith("bias") for name in our_gradients)  # transformers' GPT-2 always has biases
    total, expected_total = (
        torch.stack([g.norm() for name, g in grads.items() if biased or not name.endswith("bias")]).norm()
        for grads in (our_gradients, their_gradients)
    )
    torch.testing.assert_close(total, expected_total, rtol=1e-4, atol=0)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def stirred(model: nn.Module) -> dict[str, Tensor]:
    """Add noise to all parameters of a model, and return the parameters by name.

    With this noise, an error in the conversion of biases and norms changes the results.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def hybrid() -> tuple[nn.Module, Decoder]:
    """Return transformers' NemotronH, and a decoder of fewbits that computes in FP32 with the same weights."""
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
    weights = {_renamed(name, names): value for name, value in stirred(theirs).items()}
    for number, letter in enumerate(pattern):
        block, mixer = f"blocks.{number}", mixers[letter]
        for name in [name for name in weights if name.startswith(f"{block}.")]:
            renamed = _renamed(name, parts).replace(f"{block}.norm", f"{block}.{mixer}_norm").replace("mixer", mixer)
            weights[renamed] = weights.pop(name)
        if letter == "M":
            weights[f"{block}.mamba.conv_weight"] = weights[f"{block}.mamba.conv_weight"].squeeze(1).mT
        if letter == "*":
            qkv = [weights.pop(f"{block}.attention.{part}_proj.weight") for part in "qkv"]
            weights[f"{block}.attention.qkv.weight"] = torch.cat(qkv)
    mamba = {"mamba_groups": 2, "mamba_state": 8, "mamba_head_dim": 16}
    ours = build(
        small("hybrid-8b", layers=4, pattern=pattern, kv_heads=2, **mamba), seed=0, compute_dtype=torch.float32
    )
    ours.load_state_dict(weights)
    return theirs, ours


def _renamed(name: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name
