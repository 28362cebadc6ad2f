"""Test recipes with `execute: fp8`: results close to those of the emulation, refused recipes, copies of layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fewbits.kernels.fp8_products import Fp8Operand, encode_fp8, scaled_product
from fewbits.models.execution import check_tokens
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe
from tests.models.quantized import linear, normal, recipe

CHANNEL, TENSOR, ROUNDED = "e4m3:channel:amax", "e4m3:tensor:amax", "e4m3:channel:amax:stochastic"
U = 2.0**-8  # the largest relative error of rounding to BF16


def pair(spec: Recipe, *, bias: bool = False, keep_weights: bool = True) -> list[QuantizedLinear]:
    """Return two layers with equal parameters: one with `execute: fp8`, and one that emulates the recipe."""
    layers = []
    for execute in ("fp8", "emulate"):
        own = Recipe.from_dict({**spec.to_dict(), "execute": execute})
        model = nn.Sequential(linear(64, 48, bias=bias))
        layers += quantize(model, own, seed=3, keep_weights=keep_weights).layers
    return layers


def step(layer: QuantizedLinear, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return y, the gradient of x, and the gradients of the layer's parameters."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return y.detach(), leaf.grad, *(g.clone() for g in gradients)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("output", ["bf16", "fp32"])
@pytest.mark.parametrize("text", [CHANNEL, TENSOR, ROUNDED])
def test_outputs_and_gradients_are_those_of_the_emulation_within_the_rounding_of_its_operands(
    text: str, output: str, bias: bool
) -> None:
    x, dy = normal(32, 64, seed=1).bfloat16(), normal(32, 48, seed=2).bfloat16()
    executed, emulated = pair(recipe(text, output=output), bias=bias)
    w = executed.weight.detach()
    ones = torch.ones(48)
    sizes = (
        x.float().abs() @ w.abs().t() + ones * (executed.bias.abs() if bias else 0),
        dy.float().abs() @ w.abs(),
        dy.float().abs().t() @ x.float().abs(),
        dy.float().abs().sum(0),
    )
    results = list(zip(step(executed, x, dy), step(emulated, x, dy), sizes, strict=False))
    assert len(results) == 3 + bias
    for ours, theirs, size in results:
        assert ours.dtype == theirs.dtype
        # Results differ by at most 4 roundings to BF16: of both operands and the result in the emulation, and of the
        # executed result. `size` is computed from unrounded operands; E4M3 can make it larger, hence the factor 1.2.
        assert ((ours.float() - theirs.float()).abs() <= 4.5 * U * size * 1.2).all()
    assert not torch.equal(results[0][0], results[0][1])


def test_the_forward_product_reads_codes_and_scales_as_encode_returns_them() -> None:
    executed, _ = pair(recipe(CHANNEL))
    x = normal(32, 64, seed=1).bfloat16()
    w = encode_fp8(executed.weight.detach().bfloat16(), CHANNEL, -1, 0)
    assert torch.equal(executed(x), scaled_product(encode_fp8(x, CHANNEL, -1, 0), w.t(), torch.bfloat16))
    assert isinstance(executed._weights.values[0], Fp8Operand)  # type: ignore[union-attr]


def test_weights_that_are_not_kept_and_recomputed_blocks_give_the_same_bits() -> None:
    x, dy = normal(32, 64, seed=1).bfloat16(), normal(32, 48, seed=2).bfloat16()
    once, again, recomputed = (pair(recipe(ROUNDED), keep_weights=keep)[0] for keep in (True, False, True))
    expected = step(once, x, dy)
    leaf = x.clone().requires_grad_()
    y = checkpoint(recomputed, leaf, use_reentrant=False)
    y.backward(dy)
    for ours in (step(again, x, dy), (y.detach(), leaf.grad, recomputed.weight.grad)):
        assert all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))


def test_a_gemm_of_unquantized_operands_is_computed_as_usual() -> None:
    forward_only = Recipe.from_dict({"fprop": {"x": CHANNEL, "w": CHANNEL}})
    executed, emulated = pair(forward_only)
    x, dy = normal(32, 64, seed=1).bfloat16(), normal(32, 48, seed=2).bfloat16()
    ours, theirs = step(executed, x, dy), step(emulated, x, dy)
    assert not torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))


def test_statistics_are_those_of_the_emulation() -> None:
    rows = []
    for execute in ("fp8", "emulate"):
        model = nn.Sequential(linear(64, 48))
        observer = Observer(ObserverConfig(window=1, every=1, gradients_every=0))
        quantization = quantize(model, recipe(CHANNEL, execute=execute), observer=observer)
        quantization.begin(0)
        model(normal(32, 64, seed=1).bfloat16())
        rows.append([row for row in observer.rows(0, quantization.layers) if row["slot"].startswith("fprop")])
    assert rows[0]
    assert [(row["slot"], row["error"]) for row in rows[0]] == [(row["slot"], row["error"]) for row in rows[1]]


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ({"fprop": {"x": "e4m3:1x16:amax", "w": CHANNEL}}, "fprop.x is e4m3:1x16:amax"),
        ({"fprop": {"x": CHANNEL, "w": "e5m2:channel:amax"}}, "fprop.w is e5m2:channel:amax"),
        ({"fprop": {"x": CHANNEL}}, "fprop.w is high"),
        ({"fprop": {"x": CHANNEL, "w": "e4m3:tensor:gam"}}, "fprop.w is e4m3:tensor:gam"),
        ({"fprop": {"x": CHANNEL, "w": CHANNEL}, "dgrad": {"dy": CHANNEL, "w": "same"}}, "dgrad.w is `same`"),
        ({"fprop": {"x": f"{CHANNEL} @ error<0.1 | bf16", "w": CHANNEL}}, "fprop.x is e4m3:channel:amax @"),
        ({"fprop": {"x": CHANNEL, "w": CHANNEL}, "switch": {"at": 0.5, "to": "e5m2:tensor:amax"}}, "e5m2:tensor:amax"),
        ({"fprop": {"x": CHANNEL, "w": CHANNEL}, "keep": {"first": 1, "by": "e5m2:tensor:amax"}}, "e5m2:tensor:amax"),
    ],
)
def test_other_operands_are_refused_at_set_up_by_layer_slot_and_quantizer(slots: dict[str, object], named: str) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"up": linear(64, 64)}) for _ in range(2))})
    with pytest.raises(ValueError, match="execute fp8") as refusal:
        quantize(model, Recipe.from_dict({**slots, "execute": "fp8"}))
    message = str(refusal.value)
    assert "blocks.0.up" in message
    assert named in message
    assert "e4m3 with block tensor or channel and scaling amax" in message or "its own quantizer" in message
    assert "\n" not in message


def test_layers_and_micro_batches_of_other_sizes_are_refused_at_set_up() -> None:
    with pytest.raises(ValueError, match=r"48x40.*multiples of 16"):
        quantize(nn.Sequential(linear(40, 48)), recipe(CHANNEL, execute="fp8"))
    check_tokens(recipe(CHANNEL), 40)
    switched = Recipe.from_dict({"execute": "fp8", "switch": {"at": 0.5, "passes": "backward", "to": CHANNEL}})
    for spec in (recipe(CHANNEL, execute="fp8"), switched):
        check_tokens(spec, 64)
        with pytest.raises(ValueError, match="40 tokens"):
            check_tokens(spec, 40)


def test_a_recipe_without_quantized_gemms_cannot_be_executed() -> None:
    with pytest.raises(ValueError, match="no GEMM of recipe bf16"):
        quantize(nn.Sequential(linear(64, 48)), Recipe.from_dict({"execute": "fp8"}))
    with pytest.raises(ValueError, match="execute 'fp4'"):
        Recipe.from_dict({"execute": "fp4"})


def test_copies_and_pickles_of_an_executed_layer_give_the_same_output() -> None:
    layer, x = pair(recipe(CHANNEL))[0], normal(32, 64, seed=1).bfloat16()
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)


def test_executed_runs_have_a_label_of_their_own() -> None:
    emulated, executed = (recipe(CHANNEL, name="mine", execute=how) for how in ("emulate", "fp8"))
    assert emulated.label == "mine"
    assert executed.label != emulated.label
    assert isinstance(quantize(nn.Sequential(linear(64, 48)), executed), Quantization)
