"""Test samplers in models (GaussWS, DiffQ): noise on weights that depends on step and layer, and learned bit widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.kernels.api import mix
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise, unpack_noise
from fewbits.kernels.seeds import derive_seed
from fewbits.models.quantize import quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import SLOTS, Recipe
from tests.kernels.inputs import grad_of
from tests.models.quantized import MIXED, Calls, batch, linear, noisy, normal, recipe, tiny

SEED = 11
NOISE = {"gaussws": "gaussian", "diffq": "uniform"}


def sampled(inner: int, out: int, *, slots: Recipe | None = None, **sampler: Any) -> QuantizedLinear:
    """Build one quantized layer with noise on its weight.

    slots: the recipe of the operands; None: all in high precision. sampler: settings of the sampler.
    """
    sampler = {"kind": "gaussws", "penalty": 1e-4, **sampler}
    base = (slots or recipe("high", output="fp32")).to_dict()
    model = nn.Sequential(linear(inner, out, draw=noisy if slots else normal))
    model[0].part = "up"  # type: ignore[assignment]
    return quantize(model, Recipe.from_dict({**base, "sampler": sampler}), seed=SEED).layers[0]


def scale_of(layer: QuantizedLinear) -> nn.Parameter:
    assert layer.bit_scale is not None
    return layer.bit_scale


def bits_of(layer: QuantizedLinear) -> Tensor:
    assert layer.bits is not None
    return layer.bits.detach()


def weight_read(layer: nn.Module, inner: int, dtype: torch.dtype) -> Tensor:
    """Return the weight that fprop multiplies by, obtained by passing the identity matrix through the layer."""
    with torch.no_grad():
        return layer(torch.eye(inner, dtype=dtype)).t()


def spread(grid: Tensor, like: Tensor, block: int) -> Tensor:
    """Repeat the value of each square for all its elements. like: a tensor of the result's shape."""
    rows, cols = like.shape
    return grid.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :cols]


def largest(w: Tensor, block: int) -> Tensor:
    """Return the largest magnitude in each square of a weight."""
    rows, cols = w.shape
    padded = nn.functional.pad(w.abs(), (0, -cols % block, 0, -rows % block))
    return padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).amax((1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("kind", NOISE)
def test_both_forward_and_dgrad_read_the_sampled_weight_of_the_step(kind: str, block: int, dtype: torch.dtype) -> None:
    """Check that fprop and dgrad read the weight plus noise (GaussWS eq. 3).

    `block` does not divide the weight's sizes, so squares at two of its edges are incomplete.
    """
    layer = sampled(40, 70, kind=kind, block=block, init=5, target=3)
    with torch.no_grad():
        scale_of(layer).copy_(normal(*scale_of(layer).shape, seed=4))
    for step in (0, 3):
        layer.owner[0].context = type(layer.owner[0].context)(step)
        expected = sample_weight(
            *(layer.weight.detach(), bits_of(layer), derive_seed(SEED, step, 0, len(SLOTS))),
            noise=NOISE[kind],  # type: ignore[arg-type]
            block=block,
            dtype=dtype,
        )
        assert not torch.equal(expected.float(), layer.weight.detach().to(dtype).float())
        assert torch.equal(weight_read(layer, 40, dtype), expected)
        x = torch.zeros(70, 40, dtype=dtype, requires_grad=True)
        layer(x).backward(torch.eye(70, dtype=dtype))
        assert torch.equal(grad_of(x), expected)


@pytest.mark.parametrize("kind", NOISE)
def test_the_gradient_of_bit_scale_is_autograds_with_the_maximum_detached(kind: str) -> None:
    """Compare the gradients of the weight w and the parameter b_i with autograd's for the paper's formula (claim G6).

    The formula is w + noise · largest · 2^(1 − b_t), where b_t = target + b_i·(init − target) is the bit width (GaussWS
    eq. 11). `largest`, the maximum of a square, counts as a constant, so w's gradient passes straight through.
    """
    layer = sampled(40, 70, kind=kind, init=5.5, target=3)
    with torch.no_grad():
        scale_of(layer).copy_(1 + 0.2 * normal(*scale_of(layer).shape, seed=4))
    x, dy = normal(48, 40, seed=1), normal(48, 70, seed=2)
    layer(x).backward(dy)

    w, b_i = layer.weight.detach().clone().requires_grad_(), scale_of(layer).detach().clone().requires_grad_()
    seed = derive_seed(SEED, 0, 0, len(SLOTS))
    if kind == "gaussws":
        noise = unpack_noise(gaussian_noise(w.numel(), seed), w.numel()).float()
    else:
        noise = uniform_noise(w.numel(), seed).float()
    steps = largest(w.detach(), 32) * torch.exp2(1 - (3 + b_i * (5.5 - 3)))
    (x @ (w + noise.view_as(w) * spread(steps, w, 32)).t()).backward(dy)
    torch.testing.assert_close(grad_of(scale_of(layer)), grad_of(b_i), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_of(layer.weight), grad_of(w), rtol=1e-5, atol=1e-4)
    assert bool((grad_of(b_i).abs() > 1e-2).all())


def test_the_penalty_is_lambda_times_the_sum_over_layers_of_mean_distance() -> None:
    """Check the penalty of GaussWS eq. 12, λ · Σ over layers of mean |bit width − target|, and its gradient."""
    model = tiny("gpt2", layers=1)
    sampler = {"kind": "gaussws", "penalty": 1e-2, "init": 6, "target": 4, "parts": ["od"]}
    quantization = quantize(model, recipe("high", sampler=sampler))
    penalty = quantization.penalty()
    assert penalty is not None
    assert penalty.item() == pytest.approx(1e-2 * 2 * 2)  # two layers, whose bit widths are 2 above the target
    out, down = (layer for layer in quantization.layers if layer.bit_scale is not None)
    with torch.no_grad():
        scale_of(out).copy_(torch.tensor([[0.5, -0.5], [2.0, 0.25]]))
    penalty = quantization.penalty()
    assert penalty is not None
    assert penalty.item() == pytest.approx(1e-2 * (2 * (0.5 + 0.5 + 2 + 0.25) / 4 + 2))
    penalty.backward()
    sign = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    torch.testing.assert_close(grad_of(scale_of(out)), 1e-2 * 2 * sign / 4)
    torch.testing.assert_close(grad_of(scale_of(down)), torch.full_like(scale_of(down), 1e-2 * 2 / 6))


# Family: its linear layers, with their parts.
LAYERS = {
    "gpt2": {"attention.qkv": "qkv", "attention.out": "out", "ffn.up": "up", "ffn.down": "down"},
    "llama2": dict.fromkeys(("attention.q", "attention.k", "attention.v"), "qkv")
    | {"attention.out": "out", "ffn.gate": "up", "ffn.up": "up", "ffn.down": "down"},
    "hybrid": {"mamba.in_proj": "in", "mamba.out_proj": "out", "ffn.up": "up", "ffn.down": "down"}
    | {"attention.qkv": "qkv", "attention.out": "out"},
}
GROUPS = {"all": ("qkv", "out", "up", "down", "in"), "od": ("out", "down")}


CASES = [(family, part) for family, own in LAYERS.items() for part in (*GROUPS, *dict.fromkeys(own.values()))]


@pytest.mark.parametrize(("family", "part"), CASES)
def test_parts_select_the_layers_that_are_sampled(family: str, part: str) -> None:
    hybrid: dict[str, Any] = {"layers": 3, "pattern": "M-*", "mamba_head_dim": 32, "mamba_groups": 2}
    model = tiny(family, **(hybrid if family == "hybrid" else {"layers": 1}))
    quantization = quantize(model, recipe("high", sampler={"kind": "diffq", "parts": [part]}))
    chosen = [layer.name.split(".", 2)[2] for layer in quantization.layers if layer.bit_scale is not None]
    assert chosen == [name for name, own in LAYERS[family].items() if own in GROUPS.get(part, (part,))]
    squares = {name: p.shape for name, p in model.named_parameters() if name.endswith("bit_scale")}
    assert len(squares) == len(chosen)
    for name, shape in squares.items():
        weight = model.get_parameter(name.replace("bit_scale", "weight"))
        assert tuple(shape) == tuple(-(-n // 32) for n in weight.shape)


def test_evaluation_is_without_noise_unless_the_recipe_says_so() -> None:
    for in_evaluation in (False, True):
        layer = sampled(32, 48, in_evaluation=in_evaluation)
        training = weight_read(layer, 32, torch.float32)
        layer.eval()
        evaluated = weight_read(layer, 32, torch.float32)
        assert torch.equal(evaluated, layer.weight) != in_evaluation
        assert torch.equal(evaluated, training) == in_evaluation
        layer.train()
        assert torch.equal(weight_read(layer, 32, torch.float32), training)


def test_noise_is_one_for_all_micro_batches_and_ranks_of_a_step_and_other_for_steps_and_layers() -> None:
    model = nn.Sequential(linear(32, 48), linear(48, 40))
    for layer in model:
        layer.part = "up"  # type: ignore[assignment]
    quantization = quantize(model, recipe("high", sampler={"kind": "gaussws"}), seed=SEED)
    seeds: list[int] = []
    for step in range(2):
        with Calls() as calls:
            for micro_batch, rank in ((0, 0), (1, 0), (0, 1), (1, 1)):
                quantization.begin(step, micro_batch, rank=rank)
                model(normal(24, 32, seed=1)).sum().backward()
        assert [name for name, _, _ in calls.made].count("sample_weight") == 2  # once for each layer
        drawn = {shape: args[1] for name, shape, args in calls.made if name == "sample_weight"}
        assert drawn == {args[0].shape: args[2] for name, _, args in calls.made if name == "sample_weight_backward"}
        seeds += drawn.values()
    assert len(set(seeds)) == 4


def test_a_weight_is_sampled_anew_when_its_bits_change() -> None:
    layer = sampled(32, 48)
    before = weight_read(layer, 32, torch.float32)
    with torch.no_grad():
        scale_of(layer).mul_(0.5)
    after = weight_read(layer, 32, torch.float32)
    error = (after - layer.weight).norm() / (before - layer.weight).norm()
    assert error.item() == pytest.approx(2.0, rel=1e-4)  # 5 instead of 6 bits: twice the noise


def test_a_mixture_decides_about_the_sampled_weight() -> None:
    slots = recipe("high", MIXED, "high", MIXED, "high", "high")
    layer = sampled(32, 48, slots=slots)
    noisy_weight = sample_weight(layer.weight.detach(), bits_of(layer), derive_seed(SEED, 0, 0, len(SLOTS)))
    expected, choice = mix(noisy_weight, MIXED)
    assert 0 < float(choice.float().mean()) < 1  # both quantizers were chosen
    assert torch.equal(weight_read(layer, 32, torch.bfloat16), expected)


def test_bits_are_part_of_the_models_state_and_learn_with_it() -> None:
    model, twin = tiny("gpt2", layers=1), tiny("gpt2", layers=1, seed=2)
    quantizations = [quantize(each, recipe("bf16", sampler={"kind": "gaussws"})) for each in (model, twin)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        quantizations[0].begin(step)
        model.loss(*batch(step)).backward()
        optimizer.step()
    bits = [m.bits for m in model.modules() if isinstance(m, QuantizedLinear) and m.bits is not None]
    assert len(bits) == 4
    assert all(float(b.detach().std()) > 0 for b in bits)
    assert sum(name.endswith("bit_scale") for name in model.state_dict()) == 4
    twin.load_state_dict(model.state_dict())
    for quantization in quantizations:
        quantization.begin(2)
    assert torch.equal(model.loss(*batch(5)), twin.loss(*batch(5)))


def test_a_model_cast_to_bf16_keeps_its_bits_meaning() -> None:
    """Check that bit widths stay FP32 after `layer.bfloat16()`, although their parameter is then BF16."""
    layer = sampled(32, 48)
    before = weight_read(layer, 32, torch.bfloat16)
    layer.bfloat16()
    assert bits_of(layer).dtype == torch.float32
    x = normal(24, 32, seed=1, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert grad_of(scale_of(layer)).dtype == torch.bfloat16
    assert weight_read(layer, 32, torch.bfloat16).shape == before.shape
