"""Test mixtures of experts: each expert's products, the loss that balances loads, and the table of layers."""

import pytest
import torch
from torch import Tensor

from fewbits.kernels.api import fake_quantize
from fewbits.kernels.layers.activations import swiglu
from fewbits.kernels.products import linear, matmul
from fewbits.models.layer_table import layer_table
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.layers import MixtureOfExperts
from fewbits.models.networks.registry import build, on_meta
from fewbits.models.quantize import quantize
from fewbits.models.recipe import Recipe
from tests.models.oracles import small
from tests.models.quantized import normal, recipe

TENSOR, BLOCKS = "e4m3:tensor:amax", "e2m1:1x16:nvfp4"  # with the first, all rows that are quantized together count


def mixture(**changes: object) -> Decoder:
    config = small("moe-nano", **{"experts": 4, "active_experts": 2, "width": 64, **changes})
    return build(config, seed=1, compute_dtype=torch.float32)


def layer_of(model: Decoder) -> MixtureOfExperts:
    layer = model.blocks[0].ffn
    assert isinstance(layer, MixtureOfExperts)
    return layer


def weight_of(layer: MixtureOfExperts, expert: int, name: str) -> Tensor:
    return layer.get_parameter(f"experts.{expert}.{name}.weight")


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("spec", [TENSOR, BLOCKS])
def test_each_experts_products_read_its_own_tokens_quantized_alone(spec: str) -> None:
    model = mixture()
    quantize(model, recipe(spec, name="experts"))
    layer, x = layer_of(model), normal(2, 24, 64, seed=1)
    with torch.no_grad():
        layer.router.weight[3] = -10 * x.mean((0, 1))  # few tokens for the last expert
    p, chosen = layer.router(x.flatten(0, 1)).softmax(-1).topk(2)
    p = (p / p.sum(-1, keepdim=True)).detach()
    dy = normal(2, 24, 64, seed=2)
    y = layer(x)
    y.backward(dy)

    terms = torch.zeros(48, 2, 64)
    for number in range(4):
        gate, up, down = (weight_of(layer, number, name) for name in ("gate", "up", "down"))
        token, place = (chosen == number).nonzero(as_tuple=True)
        assert len(token)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return linear(fake_quantize(rows, spec), fake_quantize(weight.detach(), spec))

        rows = x.flatten(0, 1)[token]
        hidden = swiglu(product(rows, gate), product(rows, up))
        terms[token, place] = product(hidden, down)
        own = dy.flatten(0, 1)[token] * p[token, place, None]
        exact = matmul(fake_quantize(own, spec, axis=0).t(), fake_quantize(hidden, spec, axis=0))
        assert torch.equal(gradient(down), exact.bfloat16().float()), number
    assert torch.equal(y, (terms * p[..., None]).sum(1).view_as(y))


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    model = mixture()
    quantize(model, recipe(BLOCKS, name="experts"))
    layer = layer_of(model)
    x = normal(1, 24, 64, seed=1).abs()
    with torch.no_grad():
        layer.router.weight[3] = -10
    layer(x).sum().backward()
    assert gradient(weight_of(layer, 3, "up")).eq(0).all()
    assert gradient(weight_of(layer, 0, "up")).ne(0).any()


def test_balance_adds_a_gradient_to_routers_in_training_and_nothing_to_the_loss() -> None:
    x, y = (torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    losses, gradients = [], []
    for factor in (0.0, 0.5):
        model = mixture(balance=factor, layers=1)
        loss = model.loss(x, y)
        loss.backward()
        losses.append(loss)
        gradients.append(gradient(layer_of(model).router.weight))
    assert torch.equal(*losses)
    extra = gradients[1] - gradients[0]

    seen = []
    layer_of(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().flatten(0, 1)))
    model.loss(x, y)
    router = layer_of(model).router.weight.detach().requires_grad_()
    p = (seen[0] @ router.t()).softmax(-1)
    shares = torch.bincount(p.topk(2).indices.flatten(), minlength=4) / (2 * len(p))
    (0.5 * 4 * (shares * p.mean(0)).sum()).backward()
    torch.testing.assert_close(extra, router.grad, rtol=1e-3, atol=1e-6)

    model.eval()
    model.zero_grad()
    model.loss(x, y).backward()
    torch.testing.assert_close(gradient(layer_of(model).router.weight), gradients[0])


def test_experts_that_are_quantized_alike_share_a_row_and_the_router_stays_in_high_precision() -> None:
    model = on_meta(small("moe-nano", experts=4))
    rules = [{"match": {"names": ["*.experts.2.up"]}, "slots": {"fprop.w": "e4m3:1x16:amax"}}]
    quantization = quantize(model, Recipe.from_dict({"fprop": {"x": BLOCKS, "w": BLOCKS}, "rules": rules}))
    table = layer_table(model).set_index("layer")
    assert table.loc["blocks.0.ffn.router", "why"] == "router"
    assert table.loc["blocks.0.ffn.experts.0-3.gate", "matrices"] == 4
    assert table.loc["blocks.0.ffn.experts.0-1,3.up", "fprop.w"] == BLOCKS
    assert table.loc["blocks.0.ffn.experts.2.up", "fprop.w"] == "e4m3:1x16:amax"
    assert "of the FLOPs" in quantization.summary
