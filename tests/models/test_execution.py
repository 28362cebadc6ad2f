"""Test recipes with `execute`: results close to the emulation's, refused recipes and devices, copies of layers."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fewbits.kernels.scaled_products import FORMS, ScaledOperand, encode_operands, scaled_product
from fewbits.models.execution import Executor, check_tokens, form_of_slot
from fewbits.models.layer_table import layer_table
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe
from tests.models.quantized import linear, normal, recipe

CHANNEL, TENSOR, ROUNDED = "e4m3:channel:amax", "e4m3:tensor:amax", "e4m3:channel:amax:stochastic"
U = 2.0**-8  # the largest relative error of rounding to BF16
DEEPSEEK = {
    "fprop": {"x": "e4m3:1x128:amax", "w": "e4m3:128x128:amax"},
    "dgrad": {"dy": "e4m3:1x128:amax", "w": "same"},
    "wgrad": {"dy": "e4m3:1x128:amax", "x": "e4m3:1x128:amax", "output": "fp32"},
}
NVFP4 = {
    "fprop": {"x": "e2m1:1x16:nvfp4", "w": "e2m1:16x16:nvfp4"},
    "dgrad": {"dy": "e2m1:1x16:nvfp4:stochastic", "w": "e2m1:16x16:nvfp4"},
    "wgrad": {"dy": "e2m1:1x16:nvfp4:stochastic:rht16:signs=each", "x": "e2m1:1x16:nvfp4:rht16:signs=each"},
}
MXFP8 = "e4m3:1x32:e8m0"


def pair(
    spec: Recipe, *, bias: bool = False, keep_weights: bool = True, sizes: tuple[int, int] = (64, 48)
) -> list[QuantizedLinear]:
    """Return two layers with equal parameters: one whose GEMMs are executed, and one that emulates the recipe."""
    layers = []
    kind = next(FORMS[str(form_of_slot(slot))].kind for slot in spec.operands.values() if slot.spec)
    for execute in (kind, "emulate"):
        own = Recipe.from_dict({**spec.to_dict(), "execute": execute})
        model = nn.Sequential(linear(*sizes, bias=bias))
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


@pytest.mark.parametrize(
    "spec", [recipe(MXFP8), Recipe.from_dict(DEEPSEEK), Recipe.from_dict(NVFP4)], ids=["mxfp8", "blocks", "nvfp4"]
)
def test_products_of_block_formats_are_those_of_the_emulated_operands(spec: Recipe) -> None:
    """Check all three GEMMs with the same seeds: only sums, and roundings of FP32 scales, differ."""
    x, dy = normal(128, 256, seed=1).bfloat16(), normal(128, 128, seed=2).bfloat16()
    executed, emulated = pair(spec, sizes=(256, 128))
    results = list(zip(step(executed, x, dy), step(emulated, x, dy), strict=True))
    w = executed.weight.detach().abs()
    sizes = x.float().abs() @ w.t(), dy.float().abs() @ w, dy.float().abs().t() @ x.float().abs()
    assert executed.plans[0].executed == {"fprop", "dgrad", "wgrad"}
    for (ours, theirs), size in zip(results, sizes, strict=True):
        assert ours.dtype == theirs.dtype
        assert ((ours.float() - theirs.float()).abs() <= 6 * U * size).all()


def test_the_forward_product_reads_codes_and_scales_as_they_are_encoded() -> None:
    executed, _ = pair(recipe(CHANNEL))
    x = normal(32, 64, seed=1).bfloat16()
    a, b = (encode_operands(t, (CHANNEL, -1, 0))[0] for t in (x, executed.weight.detach().bfloat16()))
    assert torch.equal(executed(x), scaled_product(a, b, torch.bfloat16))
    assert isinstance(executed._weights.values[0], ScaledOperand)  # type: ignore[union-attr]


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
        ({"fprop": {"x": "e4m3:1x128:amax", "w": CHANNEL}}, "e4m3:1x128:amax and e4m3:channel:amax"),
        ({"fprop": {"x": "e2m1:1x16:nvfp4", "w": "e2m1:1x16:nvfp4"}}, "fprop.x is e2m1:1x16:nvfp4"),
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
    assert any(text in message for text in ("valid in fp8", "its own quantizer", "torch has no product"))
    assert "\n" not in message


def test_layers_and_micro_batches_of_other_sizes_are_refused_at_set_up() -> None:
    with pytest.raises(ValueError, match=r"48x40.*multiples of 16"):
        quantize(nn.Sequential(linear(40, 48)), recipe(CHANNEL, execute="fp8"))
    check_tokens(recipe(CHANNEL), 40)
    with pytest.raises(ValueError, match=r"192 tokens.*multiple of 128"):
        check_tokens(Recipe.from_dict({**DEEPSEEK, "execute": "fp8"}), 192)
    switched = Recipe.from_dict({"execute": "fp8", "switch": {"at": 0.5, "passes": "backward", "to": CHANNEL}})
    for spec in (recipe(CHANNEL, execute="fp8"), switched):
        check_tokens(spec, 64)
        with pytest.raises(ValueError, match="40 tokens"):
            check_tokens(spec, 40)


GPUS = {
    name: Executor(name, at) for name, at in (("A100", (8, 0)), ("L40", (8, 9)), ("H100", (9, 0)), ("B200", (10, 0)))
}
BLOCKS, KINDS = (
    Recipe.from_dict(DEEPSEEK),
    {"fp8": recipe(CHANNEL), "mxfp8": recipe(MXFP8), "nvfp4": Recipe.from_dict(NVFP4)},
)


@pytest.mark.parametrize(("gpu", "kind"), list(product(GPUS, KINDS)))
def test_a_kind_of_product_is_executed_where_the_device_has_it_and_refused_elsewhere(
    gpu: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check `execute` by name, which refuses a device in one line, and `auto`, which says why GEMMs are emulated."""
    monkeypatch.setattr(Executor, "of", lambda device, execute: GPUS[gpu])
    has = kind in {"A100": (), "L40": ("fp8",), "H100": ("fp8",), "B200": ("fp8", "mxfp8", "nvfp4")}[gpu]
    spec = KINDS[kind].to_dict()
    if has:
        quantize(nn.Sequential(linear(64, 64)), Recipe.from_dict({**spec, "execute": kind}))
    else:
        with pytest.raises(
            ValueError, match=rf"^execute {kind}: layer 0: fprop: {gpu} \(compute.* has no {kind} product.*emulate$"
        ):
            quantize(nn.Sequential(linear(64, 64)), Recipe.from_dict({**spec, "execute": kind}))
    model = nn.Sequential(linear(64, 64))
    quantization = quantize(model, Recipe.from_dict({**spec, "execute": "auto"}))
    assert quantization.layers[0].plans[0].executed == ({"fprop", "dgrad", "wgrad"} if has else set())
    assert ("fprop, dgrad, wgrad executed" in quantization.execution) == has
    assert (f"has no {kind} product" in quantization.execution) == (not has)
    assert layer_table(model)["execute"].tolist() == [quantization.execution]


def test_auto_executes_the_gemms_that_can_be_executed_and_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = nn.Sequential(linear(128, 128), linear(128, 72)), {**DEEPSEEK, "wgrad": {"dy": "bf16", "x": "bf16"}}
    auto = Recipe.from_dict({**spec, "execute": "auto"})
    text = quantize(copy.deepcopy(model), auto).execution
    assert text.startswith("execute auto on cpu: fprop, dgrad, wgrad of 2 layers emulated (a CPU has no")
    monkeypatch.setattr(Executor, "of", lambda device, execute: GPUS["H100"])
    quantization = quantize(model, auto)
    assert [layer.plans[0].executed for layer in quantization.layers] == [{"fprop", "dgrad"}, set()]
    for part in ("fprop, dgrad of 1 layers executed", "the layer is 72x128", "wgrad.dy is bf16"):
        assert part in quantization.execution


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "blocks"])
def test_training_on_a_gpu_that_executes_stays_with_the_emulation(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    spec = BLOCKS if kind == "blocks" else KINDS[kind]
    x, dy = normal(256, 512, seed=1).bfloat16().cuda(), normal(256, 384, seed=2).bfloat16().cuda()
    results = []
    for execute in ("auto", "emulate"):
        quantization = quantize(
            nn.Sequential(linear(512, 384)).cuda(), Recipe.from_dict({**spec.to_dict(), "execute": execute})
        )
        results.append(step(quantization.layers[0], x, dy))
        if execute == "auto" and not quantization.layers[0].plans[0].executed:
            pytest.skip(quantization.execution)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=0.05, atol=float(theirs.float().abs().max()) * 0.01
        )
