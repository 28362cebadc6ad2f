"""Test delayed scales: their bits and history against plain torch, and that the state outlives a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbits.kernels.api import fake_quantize
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.delayed import Delayed, DelayedScales, quantize_for
from fewbits.models.quantize import quantize
from fewbits.models.recipe import Recipe
from tests.models.quantized import equal, linear, noisy, normal, recipe, tiny

HYBRID = ("e4m3:tensor:amax", "e4m3:tensor:amax", "e5m2:tensor:amax", "same", "same", "same")
SLOTS = ["fprop.x", "fprop.w", "dgrad.dy"]
QUANTIZERS = ("e4m3:tensor:amax", "e5m2:tensor:amax:stochastic", "e2m1:1x16:nvfp4:stochastic", "e2m1:1x16:ue5m3:rht16")
EDEN = "e2m1:1x16:eden:rht32:signs=5"


def delayed(*texts: str, **settings: Any) -> Recipe:
    return recipe(*texts, delayed={"slots": SLOTS, **settings})


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text", [*QUANTIZERS, EDEN])
def test_with_the_amax_of_the_tensor_the_bits_are_those_of_a_current_scale(
    text: str, dtype: torch.dtype, axis: int
) -> None:
    x = noisy(48, 40, seed=1, dtype=dtype)
    values, counts = quantize_for(x, Quantizer.parse(text), axis, 7, None, 0, watch=True)
    expected, stats = fake_quantize(x, text, axis=axis, seed=7, stats=True)
    assert torch.equal(values, expected)
    assert counts is not None
    if "tensor" not in text:  # a tensor's errors are measured before they are scaled back
        assert torch.equal(counts.sum((0, 1)), stats.counts)


def by_hand(x: Tensor, amax: float, top: float, dtype: torch.dtype, margin: int) -> Tensor:
    """Return x in FP8 with the scale top / amax / 2^margin, as TransformerEngine has it, divided at the end."""
    scale = torch.tensor(top) / torch.tensor(amax) / 2.0**margin
    return ((x * scale).clamp(-top, top).to(dtype).float() / scale).to(x.dtype)


@pytest.mark.parametrize(("use", "margin", "hold"), [("max", 0, 1), ("recent", 0, 1), ("max", 1, 1), ("recent", 0, 3)])
def test_scales_come_from_the_last_steps(use: str, margin: int, hold: int) -> None:
    spec = delayed(*HYBRID, history=3, use=use, margin=float(margin), hold=hold)
    quantization = quantize(nn.Sequential(linear(32, 48)), spec)
    (layer,) = quantization.layers
    past: dict[str, list[float]] = {"x": [], "w": [], "dy": []}
    held: dict[str, float] = {}
    for step in range(8):
        for name, amaxes in past.items():
            if amaxes and (name not in held or step % hold == 0):
                held[name] = max(amaxes[-3:]) if use == "max" else amaxes[-1]
        this: dict[str, list[float]] = {"x": [], "w": [], "dy": []}
        for micro_batch in range(2):
            quantization.begin(step, micro_batch)
            x = (normal(24, 32, seed=10 * step + micro_batch) * 1.7 ** (step % 4)).requires_grad_()
            dy, w = normal(24, 48, seed=10 * step + micro_batch + 5) * 1e-3, layer.weight.detach()
            with torch.no_grad():
                layer(x * 100)  # an evaluation, which leaves no trace
            layer.weight.grad = None
            y = layer(x)
            y.backward(dy)
            q = {}
            for name, tensor, top, dtype in (
                ("x", x.detach(), 448.0, torch.float8_e4m3fn),
                ("w", w, 448.0, torch.float8_e4m3fn),
                ("dy", dy, 57344.0, torch.float8_e5m2),
            ):
                this[name].append(float(tensor.abs().max()))
                q[name] = by_hand(tensor, held.get(name, this[name][-1]), top, dtype, margin)
            torch.testing.assert_close(y, q["x"] @ q["w"].t(), rtol=1e-5, atol=1e-5)
            assert x.grad is not None
            torch.testing.assert_close(x.grad, q["dy"] @ q["w"], rtol=1e-5, atol=1e-8)
        for name, amaxes in past.items():
            amaxes.append(max(this[name]))
        with torch.no_grad():
            layer.weight.mul_(1.3)


def test_an_amax_that_is_no_number_leaves_the_scale() -> None:
    scales = DelayedScales(Delayed(history=1), 2)
    for step, amax in enumerate((3.0, float("inf"), float("nan"), 0.0)):
        scales.advance(step)
        scales.amax(1, torch.tensor([amax, -1.0 if amax else 0.0]))
        assert scales.held.tolist() == [0, 3 if step else 0]
    scales.advance(4)
    assert scales.held.tolist() == [0, 3]


def trained(steps: range, start: tuple[Any, ...] | None = None) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Train the steps of a range, from the beginning or from the state that an earlier call returned."""
    model = tiny("gpt2")
    quantization = quantize(model, delayed(*HYBRID, history=2, hold=2), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
        quantization.load_state_dict(start[2])
    seen = []
    for step in steps:
        quantization.begin(step)
        text = (torch.arange(64).view(2, 32) * (step + 3)) % 256
        loss = model.loss(text, text.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    state = model.state_dict(), optimizer.state_dict(), quantization.state_dict()
    return seen, copy.deepcopy(state)


def test_training_resumed_from_a_state_dict_has_the_same_bits() -> None:
    whole, _ = trained(range(7))
    first, state = trained(range(3))
    second, _ = trained(range(3, 7), state)
    assert equal(whole, first + second)
    del state[2]["delayed"]["seen"]
    lost, _ = trained(
        range(3, 7), (*state[:2], {**state[2], "delayed": {**state[2]["delayed"], "seen": torch.zeros(48)}})
    )
    assert not equal(whole, first + lost)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": ["fprop"]}, "delayed.slots 'fprop': valid values are fprop.x"),
        ({"history": 0}, "delayed.history 0: expected a number of steps"),
        ({"use": "mean"}, "delayed.use 'mean': valid values are max, recent"),
        ({"slots": ["fprop.w"]}, "delayed.slots: fprop.w is e4m3:1x32:amax, which has no scale for the whole tensor"),
    ],
)
def test_what_cannot_be_delayed_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict({"fprop": {"w": "e4m3:1x32:amax"}, "delayed": settings})
