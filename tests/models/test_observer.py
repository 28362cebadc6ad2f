"""Test the observer: rows compared with a slow computation, windows, and checkpoints in the middle of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.recipe import SLOTS, Recipe
from tests.models.quantized import E4M3, MIXED, NVFP4, batch, linear, look, noisy, one_layer, recipe, tiny

THREE = "e4m3:16x16:gam @ error<e5m2:16x16:gam | e5m2:16x16:gam @ spread<normal | bf16 ; per=block"
FIVE = " | ".join(f"e4m3:16x16:gam @ error<{t}" for t in (0.05, 0.06, 0.3, 0.5)) + " | bf16 ; per=block"
ALWAYS = ObserverConfig(window=4, every=1, gradients_every=1)
Rows = list[dict[str, Any]]


def data(micro_batch: int) -> tuple[Tensor, Tensor]:
    x = noisy(48, 32, seed=micro_batch, dtype=torch.bfloat16)
    return x, noisy(48, 64, seed=50 + micro_batch, dtype=torch.bfloat16)


def observed(spec: Recipe, config: ObserverConfig = ALWAYS, *, micro_batches: int = 3) -> tuple[Rows, Quantization]:
    """Return the observer's rows for one layer after one step with this recipe, and the quantization."""
    observer = Observer(config)
    quantization = quantize(nn.Sequential(linear(32, 64, draw=noisy)), spec, observer=observer)
    for micro_batch in range(micro_batches):
        quantization.begin(0, micro_batch)
        x, dy = data(micro_batch)
        quantization.layers[0](x.requires_grad_()).backward(dy)
    return observer.rows(0, quantization.layers), quantization


def slowly(x: Tensor, y: Tensor) -> tuple[float, int, int, int]:
    """Return statistics of the quantized values y of x, computed by a loop over elements.

    They are the mean relative error over non-zero elements, where an error above 1 counts as 1; and the numbers of
    non-zero elements, of flushed elements (y = 0) and of capped elements (error above 1).
    """
    total, nonzeros, flushed, capped = 0.0, 0, 0, 0
    for a, b in zip(x.double().flatten().tolist(), y.double().flatten().tolist(), strict=True):
        if a != 0:
            error = abs(a - b) / abs(a)
            total += min(error, 1)
            nonzeros, flushed, capped = nonzeros + 1, flushed + (b == 0), capped + (error > 1)
    return total / max(nonzeros, 1), nonzeros, flushed, capped


def histogram(errors: list[float]) -> list[int]:
    """Count errors in 20 bins of half a percent each, and one bin for all larger errors."""
    counts = [0] * 21
    for error in errors:
        counts[min(int(error / 0.005), 20)] += 1
    return counts


def by_slot(rows: Rows) -> dict[str, dict[str, Any]]:
    assert len({row["slot"] for row in rows}) == len(rows)
    return {row["slot"]: row for row in rows}


@pytest.mark.parametrize(
    "text", [E4M3, "e2m1:1x16:nvfp4", "e4m3:16x16:mx", "e5m2", f"{E4M3}:stochastic", MIXED, THREE, FIVE]
)
def test_rows_are_what_is_computed_slowly_by_hand(text: str) -> None:
    """Compare the rows with a slow computation; a mixture's errors are those of its first quantizer in all blocks."""
    rows, quantization = observed(recipe("high", text, text, "high", "high", text))
    slots = by_slot(rows)
    assert list(slots) == ["fprop.w", "dgrad.dy", "wgrad.x", "weight"]
    layer = quantization.layers[0]
    w = layer.weight.detach().bfloat16()
    inputs: dict[str, list[Tensor]] = {
        "fprop.w": [w],
        "dgrad.dy": [data(m)[1] for m in range(3)],
        "wgrad.x": [data(m)[0] for m in range(3)],
    }
    first = text.split(" @ ")[0]
    for slot, tensors in inputs.items():
        axis = 0 if slot == "wgrad.x" else -1
        means, sums, saturated = [], [0, 0, 0], 0
        choices: list[int] = []
        for micro_batch, tensor in enumerate(tensors):
            seed = layer.seed(type(quantization.context)(0, micro_batch), slot)
            y, stats = fake_quantize(tensor, first, axis=axis, seed=seed, stats=True)
            mean, *counts = slowly(tensor, y)
            means.append(mean)
            sums = [a + b for a, b in zip(sums, counts, strict=True)]
            saturated += int(stats.saturated)
            if "|" in text:
                choices += mix(tensor, text, axis=axis, seed=seed)[1].flatten().tolist()
        row = slots[slot]
        assert row["quantizer"] == (text if "|" in text else str(Quantizer.parse(text)))
        assert row["batches"] == len(tensors)
        assert row["error"] == pytest.approx(sum(means) / len(means), rel=1e-5)
        assert row["error_max"] == pytest.approx(max(means), rel=1e-5)
        assert row["histogram"] == histogram(means)
        nonzeros, flushed, capped = sums
        assert (row["flushed"], row["capped"]) == (flushed / nonzeros, capped / nonzeros)
        assert (row["saturated"], row["lost"]) == (saturated / nonzeros, 0)
        shares = {key: value for key, value in row.items() if key.startswith("share_")}
        entries = [min(choice, 3) for choice in choices]  # choices of the fourth and all later quantizers are one count
        assert shares == {f"share_{e}": entries.count(e) / len(entries) for e in range(4) if entries}


def test_what_came_back_as_nan_is_lost() -> None:
    """Check that if a block has an infinite element, `lost` counts all its elements, which are returned as NaN."""
    layer, quantization = one_layer(recipe(E4M3), 32, 64)
    quantization.observer = observer = Observer(ALWAYS)
    observer.bind(1)
    quantization.begin(0)
    x, _ = data(0)
    x[3, 5] = float("inf")
    layer(x)
    row = by_slot(observer.rows(0, quantization.layers))["fprop.x"]
    assert row["lost"] == 16  # all elements of a block


def test_the_weight_gradients_error_and_cosine_are_those_beside_the_unquantized_operands() -> None:
    rows, quantization = observed(recipe(E4M3), micro_batches=2)
    row = by_slot(rows)["weight"]
    x, dy = data(0)  # the error is measured only in the first micro-batch of a step
    exact = dy.float().t() @ x.float()
    q = fake_quantize(dy, E4M3, axis=0).t().float() @ fake_quantize(x, E4M3, axis=0).float()
    q = q.bfloat16().float()
    assert row["gradient_error"] == pytest.approx(((q - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert row["gradient_cosine"] == pytest.approx(
        cosine_similarity(q.flatten(), exact.flatten(), dim=0).item(), rel=1e-5
    )
    weight = quantization.layers[0].weight
    assert weight.grad is not None
    assert row["weight_norm"] == pytest.approx(weight.detach().norm().item())
    assert row["gradient_norm"] == pytest.approx(weight.grad.norm().item())


def test_bit_widths_are_told_of_layers_that_have_them() -> None:
    """Check that only rows of layers with a sampler have statistics of bit widths."""
    observer = Observer(ALWAYS)
    model = tiny("gpt2", layers=1)
    spec = recipe("high", sampler={"kind": "gaussws", "parts": ["down"], "init": 6, "target": 4})
    quantization = quantize(model, spec, observer=observer)
    down = quantization.layers[-1]
    assert down.bit_scale is not None
    with torch.no_grad():
        down.bit_scale.copy_(torch.tensor([[0.5, 0.6, 1.0], [2.5, 3.5, 4.5]]))  # 5, 5.2, 6, 9, 11, 13 bits
    rows = {row["layer"]: row for row in observer.rows(0, quantization.layers)}
    assert not any(key.startswith("bits") for key in rows["blocks.0.ffn.up"])
    row = rows["blocks.0.ffn.down"]
    assert row["bits_mean"] == pytest.approx(49.2 / 6, rel=1e-6)
    assert (row["bits_min"], row["bits_max"]) == pytest.approx((5, 13))
    assert row["bits_std"] == pytest.approx(3.0441, rel=1e-4)
    assert [row[f"bits_to_{tier}"] for tier in (5, 9, 12)] == pytest.approx([1 / 6, 4 / 6, 5 / 6])


# ---- windows


def steps(
    observer: Observer,
    quantization: Quantization,
    model: Any,
    which: range,
    *,
    micro_batches: int = 2,
    evaluate: bool = False,
) -> Rows:
    """Train the steps `which` and return the observer's rows.

    evaluate: also evaluate the model before each micro-batch and after each update.
    """
    rows: Rows = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in which:
        for micro_batch in range(micro_batches):
            quantization.begin(step, micro_batch)
            if evaluate:
                look(model)
            model.loss(*batch(10 * step + micro_batch)).backward()
        if observer.due(step):
            rows += observer.rows(step, quantization.layers)
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            look(model)
    return rows


def counted(spec: Recipe, config: ObserverConfig, count: int, *, evaluate: bool = False) -> Rows:
    observer, model = Observer(config), tiny("llama2", layers=1)
    return steps(observer, quantize(model, spec, observer=observer), model, range(count), evaluate=evaluate)


def test_windows_end_and_begin_with_their_steps() -> None:
    rows = counted(recipe(MIXED), ObserverConfig(window=3, every=0, gradients_every=0), 7)
    assert sorted({row["step"] for row in rows}) == [2, 5]
    activations = [row["batches"] for row in rows if row["slot"] in ("fprop.x", "dgrad.dy")]
    assert activations == [6] * len(activations)
    weights = [row["batches"] for row in rows if row["slot"] == "fprop.w"]
    assert weights == [3] * len(weights)  # weights are quantized once per step


def test_layers_that_share_an_input_each_report_it() -> None:
    rows = counted(recipe(MIXED), ALWAYS, 4)
    q, k, v = ([r for r in rows if r["layer"].endswith(f"attention.{n}") and r["slot"] == "fprop.x"] for n in "qkv")
    assert q[0]["batches"] == 8
    for other in (k, v):
        assert [{**row, "layer": ""} for row in other] == [{**row, "layer": ""} for row in q]


def test_mixtures_report_every_mini_batch_and_quantizers_every_so_many_steps() -> None:
    spec = recipe(E4M3, MIXED, E4M3, MIXED, E4M3, E4M3)
    rows = counted(spec, ObserverConfig(window=6, every=3, gradients_every=2), 6)
    batches = {
        slot: {row["batches"] for row in rows if row["slot"] == slot} for slot in (*SLOTS, "weight") if slot != "weight"
    }
    assert batches == {
        **{slot: {2 * 2} for slot in ("fprop.x", "dgrad.dy", "wgrad.dy", "wgrad.x")},  # steps 0 and 3
        "fprop.w": {6},
        "dgrad.w": set(),  # has no rows of its own, because it reads the values of fprop.w
    }
    never = counted(spec, ObserverConfig(window=6, every=0, gradients_every=0), 6)
    assert {row["slot"] for row in never} == {"fprop.w", "weight"}
    assert not any("gradient_error" in row for row in never)


def test_evaluation_leaves_no_trace_in_the_rows() -> None:
    for spec in (recipe(MIXED), Recipe.from_dict(NVFP4)):
        assert counted(spec, ALWAYS, 4) == counted(spec, ALWAYS, 4, evaluate=True)


def test_a_window_in_which_the_recipe_switches_gives_rows_of_before_and_after() -> None:
    observer = Observer(ALWAYS)
    model = nn.Sequential(linear(32, 64, draw=noisy), linear(64, 32))
    spec = recipe(E4M3, keep={"last": 1, "by": "e5m2"}, switch={"at": 0.5, "passes": "forward", "to": MIXED})
    quantization = quantize(model, spec, observer=observer)
    for step in range(4):
        quantization.begin(step, progress=step / 4)
        x, _ = data(step)
        model(x.requires_grad_()).sum().backward()
    rows = observer.rows(3, quantization.layers)
    switched_rows = [
        (row["slot"], row["quantizer"], row["batches"])
        for row in rows
        if row["layer"] == "0" and row["slot"] == "fprop.x"
    ]
    assert switched_rows == [("fprop.x", E4M3, 2), ("fprop.x", MIXED, 2)]
    kept = [(row["quantizer"], row["batches"]) for row in rows if row["layer"] == "1" and row["slot"] == "fprop.x"]
    assert kept == [("e5m2", 4)]


def test_more_observations_than_are_kept_pending_are_counted_too() -> None:
    observer = Observer(ObserverConfig(window=1000, every=1, gradients_every=0))
    quantization = quantize(nn.Sequential(linear(32, 64, draw=noisy)), recipe(E4M3), observer=observer)
    for step in range(200):
        quantization.begin(step)
        x, dy = data(step % 3)
        quantization.layers[0](x.requires_grad_()).backward(dy)
    assert {row["batches"] for row in observer.rows(199, quantization.layers)[:-1]} == {200}


# ---- checkpoints


@pytest.mark.parametrize("spec", [recipe(MIXED), Recipe.from_dict(NVFP4)], ids=["mixture", "nvfp4"])
def test_a_window_goes_on_from_a_checkpoint_as_though_nothing_had_been(spec: Recipe) -> None:
    straight = counted(spec, ALWAYS, 4)
    observer, model = Observer(ALWAYS), tiny("llama2", layers=1)
    quantization = quantize(model, spec, observer=observer)
    assert steps(observer, quantization, model, range(2)) == []
    state = {name: values.clone() for name, values in observer.state().items()}
    weights = {name: values.clone() for name, values in model.state_dict().items()}

    observer, model = Observer(ALWAYS), tiny("llama2", layers=1, seed=9)
    quantization = quantize(model, spec, observer=observer)
    quantization.begin(0)
    model.loss(*batch(0)).backward()  # `load_state` must discard these observations
    model.zero_grad()
    model.load_state_dict(weights)
    observer.load_state(state)
    assert steps(observer, quantization, model, range(2, 4)) == straight


class Waits(TorchDispatchMode):
    """A dispatch mode that counts the operations for which the host would wait for a GPU, on a machine without one."""

    WAIT = frozenset(("_local_scalar_dense", "bincount", "nonzero", "masked_select", "unique", "equal"))
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.WAIT
        return func(*args, **(kwargs or {}))

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **others: Any) -> Any:
            with self:
                return function(*arguments, **others)

        return run


@pytest.mark.parametrize("spec", [MIXED, THREE, E4M3])
def test_steps_wait_for_no_copy_and_a_window_for_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count waits in the observer's own methods only, because layers with mixtures also copy, but only on a CPU."""
    monkeypatch.setattr("fewbits.models.observer.OBSERVED_AT_ONCE", 2)
    observer, waits, cpu = Observer(ALWAYS), Waits(), Tensor.cpu
    for name in ("record", "record_weight_gradient", "rows"):
        monkeypatch.setattr(observer, name, waits.counting(getattr(observer, name)))

    def counted_copy(tensor: Tensor) -> Tensor:
        waits.count += 1
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted_copy)  # on a CPU tensor it does nothing that a dispatch mode could count
    quantization = quantize(nn.Sequential(linear(32, 64, draw=noisy)), recipe(spec), observer=observer)
    for step in range(ALWAYS.window):
        quantization.begin(step, 0)
        x, dy = data(step)
        quantization.layers[0](x.requires_grad_()).backward(dy)
    assert waits.count == 0
    rows = observer.rows(ALWAYS.window - 1, quantization.layers)
    assert waits.count == 1
    assert all(row["batches"] == ALWAYS.window for row in rows if row["slot"] != "weight")
    assert len(rows) > 1
