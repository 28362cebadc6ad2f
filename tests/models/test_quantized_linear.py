"""Test the quantized linear layer: the bits of its three GEMMs, weights and inputs that are quantized once, seeds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product as combinations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fewbits.kernels import products
from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.seeds import derive_seed
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear, product
from fewbits.models.recipe import SLOTS, Recipe
from tests.effort import DEEP
from tests.kernels.inputs import grad_of
from tests.models.quantized import (
    E4M3,
    MIXED,
    NVFP4,
    Calls,
    batch,
    equal,
    linear,
    noisy,
    normal,
    one_layer,
    recipe,
    tiny,
    train,
)

SR = f"{E4M3}:stochastic"
SEED = 11
OUTPUTS = {"compute": None, "bf16": torch.bfloat16, "fp32": torch.float32}

# Name: the quantizers of the six slots (one: of all slots), and the tensors that are quantized once for both GEMMs.
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": (("high",), "x w dy"),
    "bf16": (("bf16",), "x w dy"),
    "row blocks, nearest": ((E4M3,), ""),
    "row blocks, stochastic": ((SR,), ""),
    "square blocks": (("e4m3:16x16:e8m0",), "x w dy"),
    "square blocks, stochastic": (("e5m2:16x16:amax:stochastic",), "x w dy"),
    "whole tensor": (("e4m3:tensor:amax",), "x w dy"),
    "channel": (("e4m3:channel:amax",), ""),
    "gam by rows of blocks": (("e4m3:16x16:gam:group=row",), ""),
    "naive": (("e3m2",), "x w dy"),
    "mixture by tensor": (("e4m3:16x16:gam @ error<0.25 | bf16",), "x w dy"),
    "mixture by block": ((MIXED,), "x w dy"),
    "mixture by channel": (("e4m3:channel:gam @ error<0.03 | bf16 ; per=block",), ""),
    "three-way mixture": (
        ("e4m3:16x16:gam @ error<e5m2:16x16:gam | e5m2:16x16:gam @ spread<normal | bf16 ; per=block",),
        "x w dy",
    ),
    "stochastic mixture": (("e4m3:1x16:gam:stochastic @ error<0.05 | bf16 ; per=block",), ""),
    "nvfp4": (
        (
            *("e2m1:1x16:nvfp4", "e2m1:16x16:nvfp4", "e2m1:1x16:nvfp4:stochastic", "e2m1:16x16:nvfp4"),
            *("e2m1:1x16:nvfp4:stochastic:rht16", "e2m1:1x16:nvfp4:rht16"),
        ),
        "w",
    ),
    "rotated mixture in wgrad": (
        (*("high",) * 4, *("e4m3:1x16:amax:rht8 @ error<0.02 | bf16:rht8 ; per=block",) * 2),
        "",
    ),
    "same": ((SR, SR, SR, "same", "same", "same"), "x w dy"),
    "some": ((E4M3, "high", SR, E4M3, "high", MIXED), ""),
    "one of two": (("high", E4M3, "high", "same", SR, "high"), "x w"),
    "chains": (("high", f"{SR} > {SR} > bf16", f"{E4M3} > {MIXED}", "same", "high", f"{MIXED} > {SR}"), "w"),
    "requantized": ((SR, SR, SR, f"same > {SR} > {E4M3}", f"same > {SR}", f"same > {MIXED}"), ""),
}


def operand(text: str, tensor: Tensor, axis: int, seed: int) -> Tensor:
    if text == "high":
        return tensor
    return (
        mix(tensor, text, axis=axis, seed=seed)[0] if "|" in text else fake_quantize(tensor, text, axis=axis, seed=seed)
    )


def by_hand(
    slots: dict[str, str], shared: str, x: Tensor, w: Tensor, dy: Tensor, *, step: int = 0, micro_batch: int = 0
) -> dict[str, Tensor]:
    """Return the values that each GEMM reads, by slot, computed with the public quantizers alone.

    slots: the quantizer of each slot. shared: the names, separated by spaces, of the tensors that are quantized
    once for both of the GEMMs that read them.
    """
    tensors, first = {"x": x, "w": w, "dy": dy}, {"x": "fprop.x", "w": "fprop.w", "dy": "dgrad.dy"}
    operands: dict[str, Tensor] = {}
    for place, (slot, text) in enumerate(slots.items()):
        name = slot.partition(".")[2]
        if slot != first[name] and name in shared.split():
            operands[slot] = operands[first[name]]
            continue
        *others, last = text.split(" > ")
        at = (SEED, step, 0 if name == "w" else micro_batch, 0, 0, place)
        values, axis = tensors[name], -1 if slot == first[name] else 0
        for later, stage in zip(range(len(others), 0, -1), others, strict=True):
            again = stage == "same"
            values = operands[first[name]] if again else operand(stage, values, axis, derive_seed(*at, later))
        operands[slot] = operand(last, values, axis, derive_seed(*at))
    return operands


SHAPES = {"even": (48, 32, 64), "ragged, 3-D": (2, 21, 37, 45)}
COMBINED = list(combinations(enumerate(CASES), enumerate((torch.bfloat16, torch.float32)), enumerate(OUTPUTS), SHAPES))


# Without DEEP, every second combination is tested; these contain all pairs of two properties.
@pytest.mark.parametrize(
    ("case", "dtype", "output", "shape"),
    [
        pytest.param(case, dtype, output, SHAPES[shape], id=f"{case}-{dtype}-{output}-{shape}")
        for (i, case), (j, dtype), (k, output), shape in COMBINED
        if DEEP or (i + j + k + list(SHAPES).index(shape)) % 2 == 0
    ],
)
def test_the_three_gemms_read_what_the_recipe_says(
    case: str, dtype: torch.dtype, output: str, shape: tuple[int, ...]
) -> None:
    texts, shared = CASES[case]
    spec = recipe(*texts, output=output)
    *batches, inner, out = shape
    layer, quantization = one_layer(spec, inner, out, bias=True, seed=SEED)
    quantization.begin(5, 3)
    x, dy = noisy(*batches, inner, seed=1, dtype=dtype), noisy(*batches, out, seed=2, dtype=dtype)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)

    w, bias = layer.weight.detach().to(dtype), layer.bias.detach().to(dtype)
    x_rows, dy_rows = x.detach().view(-1, inner), dy.view(-1, out)
    slots = dict(zip(SLOTS, texts * 6 if len(texts) == 1 else texts, strict=True))
    q = by_hand(slots, shared, x_rows, w, dy_rows, step=5, micro_batch=3)
    assert torch.equal(y, products.linear(q["fprop.x"], q["fprop.w"], bias).view_as(y))
    assert torch.equal(grad_of(x), products.matmul(q["dgrad.dy"], q["dgrad.w"]).view_as(x))
    assert grad_of(layer.weight).dtype == torch.float32
    assert torch.equal(
        grad_of(layer.weight), product("wgrad", q["wgrad.dy"], q["wgrad.x"], OUTPUTS[output] or dtype).float()
    )
    assert torch.equal(grad_of(layer.bias), dy_rows.sum(0).float())


@pytest.mark.parametrize("keep_weights", [True, False])
def test_gemms_that_requantize_rotated_values_return_results_that_are_rotated_back(keep_weights: bool) -> None:
    turned, again = f"{E4M3}:rht32:signs=each", f"same > {SR}"
    slots = dict(
        zip(SLOTS, (turned, turned, f"{SR}:rht8", f"{again}:rht8", f"{again}:rht16", f"{again}:rht16"), strict=True)
    )
    quantization = quantize(
        nn.Sequential(linear(32, 64)), recipe(*slots.values()), seed=SEED, keep_weights=keep_weights
    )
    layer = quantization.layers[0]
    quantization.begin(5, 3)
    x, dy = noisy(48, 32, seed=1).requires_grad_(), noisy(48, 64, seed=2)
    layer(x).backward(dy)

    signs = derive_seed(SEED, 5, 3, 0, 0, len(SLOTS) + 1)  # of fprop
    resolved = {slot: text.replace("each", str(signs)) for slot, text in slots.items()}
    q = by_hand(resolved, "", x.detach(), layer.weight.detach(), dy, step=5, micro_batch=3)
    back = torch.ops.fewbits.unrotate
    turned = resolved["fprop.x"]
    assert torch.equal(grad_of(x), back(products.matmul(q["dgrad.dy"], q["dgrad.w"]), turned, -1))
    dw = back(product("wgrad", q["wgrad.dy"], q["wgrad.x"], torch.bfloat16), turned, -1)
    assert torch.equal(grad_of(layer.weight), back(dw, f"{SR}:rht8", 0).float())
    exact = dy @ layer.weight.detach()
    assert (grad_of(x) - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32), (32,), (1, 32)], ids=str)
def test_no_tokens_and_one_token_are_tokens(shape: tuple[int, ...]) -> None:
    """Check that a layer accepts inputs without tokens, inputs with one token, and a single vector."""
    layer, _ = one_layer(Recipe.from_dict(NVFP4), 32, 48)
    x = noisy(*shape, seed=1, dtype=torch.bfloat16).requires_grad_()
    y = layer(x)
    assert y.shape == (*shape[:-1], 48)
    y.backward(torch.ones_like(y))
    assert grad_of(x).shape == x.shape
    assert bool(grad_of(layer.weight).isfinite().all())


def test_strided_inputs_and_gradients_count_by_their_values() -> None:
    """Check that transposed inputs and gradients give the same bits as contiguous ones."""
    layer, _ = one_layer(recipe(MIXED), 32, 48)
    x, dy = noisy(32, 40, seed=1, dtype=torch.bfloat16), noisy(48, 40, seed=2, dtype=torch.bfloat16)
    results: list[list[Tensor]] = []
    for a, g in ((x.t(), dy.t()), (x.t().contiguous(), dy.t().contiguous())):
        layer.weight.grad = None
        a = a.detach().requires_grad_()
        y = layer(a)
        y.backward(g)
        results.append([y.detach(), grad_of(a), grad_of(layer.weight)])
    assert equal(*results)


def test_a_rotation_alone_leaves_products_as_they_are_up_to_rounding() -> None:
    """Check claim N25: rotating both operands of wgrad does not change their product, except by rounding.

    53 tokens are no multiple of the rotation's size, so that the last chunk is not full.
    """
    for tokens in (64, 53):
        x, dy = normal(tokens, 32, seed=1), normal(tokens, 48, seed=2)
        exact = dy.t().double() @ x.double()
        for text, most in (
            ("fp32:rht16", 1e-6),
            ("fp32:rht32", 1e-6),
            ("fp32:rht8:signs=none", 1e-6),
            ("fp32:rht16:signs=each", 1e-6),
            ("bf16:rht16", 4e-3),
        ):
            layer, _ = one_layer(recipe(*("high",) * 4, text, text, output="fp32"), 32, 48)
            layer(x).backward(dy)
            error = (grad_of(layer.weight) - exact).norm() / exact.norm()
            assert error < most, (tokens, text)
            assert not torch.equal(grad_of(layer.weight), dy.t() @ x)  # so operands were rotated


EACH = "fp32:rht16:signs=each"


def read_specs(quantization: Quantization, layer: QuantizedLinear, *step: int, rank: int = 0) -> list[str]:
    """Return the string forms of the quantizers, with drawn signs, that one step uses, in the order of SLOTS.

    step: the step and the micro-batch.
    """
    quantization.begin(*step, rank=rank)
    with Calls() as calls:
        layer(normal(24, 32, seed=1).requires_grad_()).sum().backward()
    pairs = {shape: args[:2] for name, shape, args in calls.made if name == "quantize_both"}
    (fprop_x, wgrad_x), (fprop_w, dgrad_w), (dgrad_dy, wgrad_dy) = (pairs[s] for s in ((24, 32), (48, 32), (24, 48)))
    return [fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x]


def test_signs_drawn_for_each_gemm_are_its_operands_alike_and_no_other_gemms() -> None:
    """Check that a GEMM's operands share their signs, which differ by GEMM, layer, step, micro-batch and rank."""
    layer, quantization = one_layer(recipe(EACH), 32, 48, seed=SEED)
    seen: set[str] = set()
    moments = ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))
    for step, micro_batch, rank in moments:
        specs = read_specs(quantization, layer, step, micro_batch, rank=rank)
        assert specs[0::2] == specs[1::2]
        seen.update(specs)
    assert len(seen) == 3 * len(moments)
    other = quantize(nn.Sequential(linear(32, 48), linear(32, 48)), recipe(EACH), seed=SEED)
    assert not seen.intersection(read_specs(other, other.layers[1], 0, 0))
    assert set(read_specs(other, other.layers[0], 0, 0)) < seen  # a new model repeats them, as a resumed trial must


def test_operands_computed_again_at_another_moment_still_turn_alike() -> None:
    """Check that a GEMM's operands get equal signs if checkpointing recomputes one in a later micro-batch."""
    layer, quantization = one_layer(recipe(EACH, output="fp32"), 32, 48)
    x, dy = normal(24, 32, seed=1).requires_grad_(), normal(24, 48, seed=2)
    quantization.begin(0, 0)
    y = checkpoint(layer, x, use_reentrant=False)
    quantization.begin(0, 1)
    y.backward(dy)
    assert torch.allclose(grad_of(x), dy @ layer.weight.detach(), atol=1e-3)
    assert torch.allclose(grad_of(layer.weight), dy.t() @ x.detach(), atol=1e-3)


# ---- quantized once


def a_step(layer: nn.Module, quantization: Quantization, step: int, micro_batches: int = 3) -> None:
    """Compute a step without an update: for each micro-batch a forward and backward pass, and an evaluation."""
    for micro_batch in range(micro_batches):
        quantization.begin(step, micro_batch)
        x = noisy(24, 32, seed=micro_batch, dtype=torch.bfloat16).requires_grad_()
        layer(x).sum().backward()
        with torch.no_grad():
            layer(x)


def test_a_weight_is_quantized_once_for_all_micro_batches_and_evaluations_of_a_step() -> None:
    for text in (E4M3, SR, "e4m3:16x16:amax", MIXED):
        layer, quantization = one_layer(recipe("high", text, "high", text, "high", "high"), 32, 48)
        both = text in (E4M3, SR)
        expected = "quantize_both" if both else "mix" if text == MIXED else "quantize"
        for step in range(2):
            with Calls() as calls:
                a_step(layer, quantization, step)
            assert calls.of(48, 32) == [expected], text


def test_rows_and_columns_that_differ_are_quantized_in_one_reading_and_squares_once() -> None:
    x = noisy(24, 32, seed=1, dtype=torch.bfloat16)
    for text, expected in ((E4M3, ["quantize_both"]), ("e4m3:16x16:amax", ["quantize"]), (MIXED, ["mix"])):
        layer, _ = one_layer(recipe(text), 32, 48)
        with Calls() as calls:
            layer(x.requires_grad_()).sum().backward()
        assert [calls.of(*shape) for shape in ((24, 32), (48, 32), (24, 48))] == [expected] * 3
    layer, _ = one_layer(recipe("e4m3:channel:amax @ error<0.03 | bf16 ; per=block"), 32, 48)
    with Calls() as calls:
        layer(x).sum().backward()
    assert calls.of(24, 32) == ["mix", "mix"]


def test_the_noise_of_squares_is_one_whichever_gemm_reads_them() -> None:
    """Check that a layer's weight gradient has the same bits whether or not its input requires a gradient.

    The input of a model's first layer requires none, so that only one of the two GEMMs that read dy is computed.
    """
    x, dy = noisy(48, 32, seed=1, dtype=torch.bfloat16), noisy(48, 64, seed=2, dtype=torch.bfloat16)
    layer, _ = one_layer(recipe("e4m3:16x16:amax:stochastic"), 32, 64)
    (alone,) = torch.autograd.grad(layer(x), (layer.weight,), dy)
    _, beside = torch.autograd.grad(layer(x.requires_grad_()), (x, layer.weight), dy)
    assert torch.equal(alone, beside)


class Writes(torch.optim.Optimizer):
    """An optimizer that writes to `.data`, which does not change a parameter's version counter."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, fused=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "writes .data": Writes,
}


def assert_fresh(layer: QuantizedLinear, x: Tensor, text: str) -> None:
    """Assert that the layer multiplies by its current weight, quantized by `text`, and not by an older one."""
    with torch.no_grad():
        assert torch.equal(layer(x), products.matmul(x, fake_quantize(layer.weight.to(x.dtype), text).t()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_is_quantized_anew_after_every_update(name: str) -> None:
    """Check that an evaluation directly after an update, before the next `begin`, uses the new weight."""
    text = "e4m3:16x16:amax"
    layer, quantization = one_layer(recipe("high", text, "high", text, "high", "high"), 32, 48)
    optimizer = OPTIMIZERS[name](list(layer.parameters()))
    x = noisy(24, 32, seed=1, dtype=torch.bfloat16)
    for step in range(2):
        quantization.begin(step)
        layer(x).sum().backward()
        before = layer.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(layer.weight, before)
        assert_fresh(layer, x, text)


def test_a_weight_is_quantized_anew_when_it_is_loaded_or_replaced() -> None:
    text = "e4m3:16x16:amax"
    layer, _ = one_layer(recipe("high", text, "high", text, "high", "high"), 32, 48)
    x = noisy(24, 32, seed=1, dtype=torch.bfloat16)
    assert_fresh(layer, x, text)
    layer.load_state_dict({"weight": noisy(48, 32, seed=8)})
    assert_fresh(layer, x, text)
    layer.load_state_dict({"weight": noisy(48, 32, seed=9)}, assign=True)
    assert_fresh(layer, x, text)
    for seed in range(10, 16):  # torch reuses freed memory, so a new weight may have the old weight's address
        layer.weight.data = noisy(48, 32, seed=seed)
        layer.weight.data = noisy(48, 32, seed=seed + 100)
        assert_fresh(layer, x, text)
    with torch.no_grad():
        layer.weight.mul_(1.1)
    assert_fresh(layer, x, text)
    assert_fresh(layer, x.float(), text)  # the cached weight has the dtype of the previous input
    layer.double()
    assert_fresh(layer, x, text)


def test_a_weight_quantized_in_inference_mode_serves_training_too() -> None:
    """Check that a weight cached in inference mode does not make the next backward pass fail."""
    layer, _ = one_layer(recipe(E4M3, E4M3, E4M3, "high", E4M3, E4M3), 32, 48)
    x = noisy(24, 32, seed=1)
    with torch.inference_mode():
        layer(x)
    layer(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize("text", [E4M3, "e4m3:16x16:amax", MIXED])
def test_layers_that_read_one_tensor_alike_quantize_it_once(text: str) -> None:
    model = tiny("llama2", layers=1)
    quantization = quantize(model, recipe(text))
    quantization.begin(0)
    with Calls() as calls:
        model.loss(*batch(0))
    weights = sum(layer.weight.shape == (64, 64) for layer in quantization.layers)
    assert weights == 4
    assert len(calls.of(64, 64)) - weights == 3  # the inputs of: q, k and v; out; gate and up


def test_layers_that_read_one_tensor_with_noise_each_draw_their_own() -> None:
    model = tiny("llama2", layers=1)
    quantization = quantize(model, recipe(SR, "high", "high", "high", "high", SR))
    with Calls() as calls:
        model.loss(*batch(0))
    assert [layer.in_features for layer in quantization.layers] == [64] * 6 + [96]
    assert len({args for _, shape, args in calls.made if shape == (64, 64)}) == len(calls.of(64, 64)) == 6


class Fork(nn.Module):
    """A model with two linear layers that read the same input; it returns their results, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear(32, 40, seed=1), linear(32, 48, seed=2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x) for block in self.blocks], -1)


def test_layers_that_read_one_tensor_differently_each_quantize_it() -> None:
    x = noisy(24, 32, seed=1)
    for by in ("high", "e5m2:1x16:amax"):
        model = Fork()
        layers = quantize(model, recipe(E4M3, keep={"last": 1, "by": by})).layers
        y = model(x)
        for layer, text, part in zip(layers, (E4M3, by), y.split((40, 48), -1), strict=True):
            assert torch.equal(
                part, products.matmul(operand(text, x, -1, 0), operand(text, layer.weight.detach(), -1, 0).t())
            )


def test_layers_under_autocast_share_their_input_too() -> None:
    model = Fork()
    quantize(model, recipe(E4M3))
    x = noisy(24, 32, seed=1)
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert calls.of(24, 32) == ["quantize_both"]
    with torch.no_grad():
        assert torch.equal(y, model(x.bfloat16()))


def test_an_input_changed_in_place_is_quantized_anew() -> None:
    layer, _ = one_layer(recipe(E4M3), 32, 48)
    x = noisy(24, 32, seed=1)
    before = layer(x)
    x.mul_(-1)
    assert torch.equal(layer(x), -before)


# ---- seeds


def seeds(ranks: int = 2) -> tuple[list[int], list[int]]:
    """Return the seeds of stochastic rounding that two layers use in two steps: a list for x and dy, and a list for w.

    In each step, each rank computes two micro-batches.
    """
    model = nn.Sequential(linear(32, 48), linear(48, 40))
    quantization = quantize(model, recipe(SR), seed=SEED)
    with Calls() as calls:
        for step in range(2):
            for micro_batch in range(2):
                for rank in range(ranks):
                    quantization.begin(step, micro_batch, rank=rank)
                    x = noisy(24, 32, seed=0, dtype=torch.bfloat16).requires_grad_()
                    model(x).sum().backward()
    of_weights: list[int] = []
    others: list[int] = []
    for name, shape, args in calls.made:
        assert name == "quantize_both"
        (of_weights if shape[0] != 24 else others).extend(args[-2:])
    return others, of_weights


def test_every_step_micro_batch_rank_layer_and_slot_has_its_own_noise_and_weights_one_for_a_step() -> None:
    others, of_weights = seeds()
    assert len(others) == len(set(others)) == 2 * 2 * 2 * 2 * 4  # steps, micro-batches, ranks, layers, slots
    assert len(of_weights) == len(set(of_weights)) == 2 * 2 * 2  # steps, layers, slots
    assert not set(others) & set(of_weights)
    assert seeds() == (others, of_weights)


def test_equal_moments_give_equal_bits_and_another_seed_gives_others() -> None:
    runs = []
    for seed in (1, 1, 2):
        model = tiny("nemotron", layers=1)
        runs.append(train(model, quantize(model, Recipe.from_dict(NVFP4), seed=seed)))
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])
    assert torch.equal(runs[0][0], runs[2][0])  # the forward of the first micro-batch has no noise


def test_evaluation_and_observation_change_no_bit_of_training() -> None:
    observing = ObserverConfig(window=2, every=2, gradients_every=1)
    each, eden = f"{SR}:rht16:signs=each", "e2m1:1x16:eden:rht16:signs=each"
    sampled = recipe(SR, sampler={"kind": "gaussws"})
    for spec in (Recipe.from_dict(NVFP4), recipe(MIXED), sampled, recipe(each), recipe(eden)):
        runs = []
        for observer, evaluate in (
            (None, False),
            (Observer(observing), False),
            (None, True),
            (Observer(observing), True),
        ):
            model = tiny("llama2", layers=1)
            runs.append(train(model, quantize(model, spec, observer=observer), evaluate=evaluate))
        assert all(equal(runs[0], run) for run in runs[1:])


# ---- features of torch


def test_autocast_computes_in_its_dtype_over_fp32_parameters() -> None:
    x, dy = noisy(24, 32, seed=1), noisy(24, 48, seed=2, dtype=torch.bfloat16)
    results = []
    for autocast in (True, False):
        layer, _ = one_layer(recipe(E4M3, output="fp32"), 32, 48, bias=True)
        a = (x if autocast else x.bfloat16()).detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(a)
            y.backward(dy)  # autocast must not round the FP32 result of wgrad
        assert y.dtype == torch.bfloat16
        results.append([y.detach(), grad_of(a).float(), grad_of(layer.weight)])
    assert equal(*results)


@pytest.mark.parametrize("text", [E4M3, SR])
def test_copies_and_pickles_compute_the_same_and_are_independent(text: str) -> None:
    model = nn.Sequential(linear(32, 48, seed=1), linear(48, 32, seed=2))
    quantization = quantize(model, recipe(text), seed=SEED, observer=Observer(ObserverConfig(every=1)))
    quantization.begin(3, 1)
    x = noisy(24, 32, seed=1).requires_grad_()
    before = len(pickle.dumps((model, quantization)))
    expected = model(x)  # now the caches have an input with an autograd graph, which cannot be copied, and weights
    assert len(pickle.dumps((model, quantization))) < 1.5 * before
    for again in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        twin, its = again((model, quantization))
        assert its.layers[0] is twin[0]
        assert twin[0].owner[0] is its
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            twin[0].weight.zero_()
        assert torch.equal(model(x), expected)
        its.begin(4)
        assert quantization.context.step == 3
