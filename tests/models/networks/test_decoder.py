"""Check that a hybrid computes the same as transformers' model, and test the decoder's loss and errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.kernels.backends.build import compiler as build_compiler
from fewbits.kernels.backends.choice import replaced_by
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from tests.kernels.backends.gpu.emulated import emulated_device
from tests.models.oracles import TOKENS, assert_equal_results, gradients, hybrid, small

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {},
    "llama2-134m": {"kv_heads": 2},
    "nemotron3-8b": {},
    "moe-1b-7b": {"experts": 4, "active_experts": 2, "shared_ffn": 32},
    "hybrid-8b": {"layers": 4, "pattern": "M-*M", "mamba_groups": 2, "mamba_state": 8, "mamba_head_dim": 16},
}


def tokens(seed: int, shape: tuple[int, int] = (2, TOKENS)) -> Tensor:
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def family(name: str, compute_dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    return build(small(name, **{**FAMILIES[name], **changes}), seed=1, compute_dtype=compute_dtype)


def test_a_hybrids_logits_and_gradients_equal_those_of_transformers_with_the_same_weights() -> None:
    """Check Mamba-2; test_huggingface.py compares the transformers."""
    assert_equal_results(*hybrid())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_token_never_changes_an_earlier_logit(name: str, dtype: torch.dtype) -> None:
    model, x = family(name, dtype), tokens(1)
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


@pytest.mark.skipif(build_compiler() is None, reason="there is no C++ compiler for the emulator")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cuda_kernels_of_layers_give_the_bits_of_the_cpus(name: str) -> None:
    """Check the loss and all gradients on the emulator, in FP32, in which torch computes attention and products."""
    model, x, y = family(name), tokens(1), tokens(2)
    device, launcher = emulated_device()
    want = model.loss(x, y)
    expected = gradients(model, want)
    with replaced_by(device):
        loss = model.loss(x, y)
        assert torch.equal(loss, want)
        for parameter, grad in gradients(model, loss).items():
            assert torch.equal(grad, expected[parameter]), parameter
    assert {"norm", "norm_backward", "entropy", "entropy_backward"} <= {v.kernel for v in launcher.launches}


def test_the_loss_of_each_token_averages_to_the_loss_and_ignored_targets_do_not_count() -> None:
    model, x, y = family("llama2-134m"), tokens(1), tokens(2)
    losses = model.loss(x, y, reduction="none")
    assert losses.shape == y.shape
    torch.testing.assert_close(losses.mean(), model.loss(x, y))
    torch.testing.assert_close(losses, -model(x).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1))

    y[0] = -100
    torch.testing.assert_close(model.loss(x, y), losses[1].mean())
    assert model.loss(x, y, reduction="none")[0].eq(0).all()


def test_a_loss_taken_in_parts_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = family("llama2-134m"), tokens(1), tokens(2)
    whole = model.loss(x, y)
    expected = gradients(model, whole)
    monkeypatch.setattr("fewbits.models.networks.decoder.LOGITS_AT_ONCE", 7 * 61)  # 48 tokens in parts of 7
    in_parts = model.loss(x, y)
    torch.testing.assert_close(in_parts, whole)
    grads = gradients(model, in_parts)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad)


def test_a_large_vocabulary_never_has_all_its_logits_alive() -> None:
    """Check that the loss computes at most LOGITS_AT_ONCE logits at a time, which limits its memory."""
    config = small("nvfp4-1.2b", vocab=131072, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, context=512)
    model, shapes = build(config, seed=1), []
    model.head.register_forward_hook(lambda head, args, output: shapes.append(output.numel()))
    x = tokens(1, (1, 300))
    model.loss(x, x).backward()
    assert len(shapes) == 6  # three parts, each computed in the forward and again in the backward pass
    assert max(shapes) <= 1 << 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, r"activation 'relu' of model 'gpt2-nano': valid values are gelu, relu2, swiglu"),
        ({"norm": "batchnorm"}, r"norm 'batchnorm' .* layernorm, layernorm1p, rmsnorm"),
        ({"positions": "alibi"}, r"positions 'alibi' .* learned, rope, none"),
        ({"init": "kaiming"}, r"init 'kaiming' .* gpt2, llama"),
        ({"kv_heads": 3}, r"kv_heads 3 .* divisors of heads, 4"),
        ({"layers": 0}, r"layers 0 .* integers ≥ 1"),
        ({"positions": "rope", "rope_fraction": 0.3}, r"rope_fraction 0.3 .* head_dim 64"),
        ({"pattern": "M-X"}, r"pattern 'M-X' .* M Mamba-2, - feed-forward, \* attention"),
        ({"pattern": "M-"}, r"layers 6 .* 2, the length of pattern 'M-'"),
        ({"pattern": "MMMMMM", "mamba_head_dim": 48}, r"mamba_head_dim 48 .* divisors of 512"),
        ({"pattern": "MMMMMM", "mamba_groups": 3}, r"mamba_groups 3 .* divisors of the 8 heads"),
        ({"init_std": 0.0}, r"init_std 0.0 .* numbers > 0"),
        ({"dropout": 1.0}, r"dropout 1.0 .* from 0 up to 1"),
        ({"dropout": -0.1}, r"dropout -0.1 .* from 0 up to 1"),
    ],
)
def test_a_wrong_setting_names_the_valid_ones(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODELS["gpt2-nano"], **changes)
