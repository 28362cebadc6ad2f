"""Test hooks: the published methods against plain formulas and autograd, and hooks of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fewbits.experiments.config import load_trial
from fewbits.experiments.identity import identity
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.seeds import derive_seed
from fewbits.models import hooks
from fewbits.models.hooks import HookStage
from fewbits.models.quantize import quantize
from fewbits.models.quantized_linear import product
from fewbits.models.recipe import Recipe
from tests.kernels.inputs import grad_of
from tests.models.quantized import linear, noisy, normal, recipe

NVFP4 = "e2m1:1x16:nvfp4"


def run(spec: Recipe, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weight, y, dx and dw of a quantized layer."""
    (layer,) = quantize(nn.Sequential(linear(x.shape[-1], dy.shape[-1])), spec).layers
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return layer.weight.detach(), y.detach(), grad_of(x), grad_of(layer.weight)


def test_averis_quantizes_the_mean_over_tokens_and_the_rest_apart() -> None:
    chain = f"averis > {NVFP4}"
    x, dy = normal(48, 32, seed=1) + 8 * normal(32, seed=3), noisy(48, 64, seed=2)
    w, y, dx, dw = run(recipe(chain, "high", chain, "high", chain, chain, output="fp32"), x, dy)

    def by_hand(values: Tensor, axis: int) -> Tensor:
        mean = values.mean(0, keepdim=True)
        return fake_quantize(values - mean, NVFP4, axis=axis) + fake_quantize(mean, NVFP4)

    assert torch.equal(y, by_hand(x, -1) @ w.t())
    assert torch.equal(dx, by_hand(dy, -1) @ w)
    assert torch.equal(dw, product("wgrad", by_hand(dy, 0), by_hand(x, 0), torch.float32))
    assert (by_hand(x, -1) - x).norm() < (fake_quantize(x, NVFP4) - x).norm()


def test_averis_draws_other_bits_for_the_mean_than_for_the_rest() -> None:
    x, text = normal(48, 32, seed=1) + normal(32, seed=3), f"{NVFP4}:stochastic"
    w, y, _, _ = run(recipe(f"averis > {text}", *["high"] * 5), x, torch.zeros(48, 8))
    mean = x.mean(0, keepdim=True)
    at = (0, 0, 0, 0, 0, 0)  # seed, step, micro-batch, rank, layer and slot
    residual = fake_quantize(x - mean, text, seed=derive_seed(*at))
    assert torch.equal(y, (residual + fake_quantize(mean, text, seed=derive_seed(*at, 16))) @ w.t())


def test_occ_adds_what_it_clamps_in_high_precision() -> None:
    x, dy, text = noisy(50, 40, seed=1), normal(50, 8, seed=2), "e2m1:channel:amax"
    w, y, _, _ = run(recipe(f"occ:quantile=0.95 > {text}", *["high"] * 5), x, dy)
    ordered = x.flatten().sort().values
    low, high = ordered[round(0.05 * 1999)], ordered[1999 - round(0.05 * 1999)]
    clamped = x.clamp(low, high)
    assert 0.08 < (clamped != x).float().mean() <= 0.1
    assert torch.equal(y, (fake_quantize(clamped, text) + (x - clamped)) @ w.t())


def test_the_gradient_of_dge_is_that_of_the_smooth_quantizer() -> None:
    x, dy, text = normal(48, 64, seed=1), normal(48, 32, seed=2), "e2m1:channel:amax"
    straight = run(recipe("high", text, *["high"] * 4, output="fp32"), x, dy)
    w, y, dx, dw = run(recipe("high", f"dge > {text}", *["high"] * 4, output="fp32"), x, dy)
    assert torch.equal(y, straight[1])
    assert torch.equal(dx, straight[2])

    factors = 6 / w.double().abs().amax(1, keepdim=True)
    scaled = (w.double() * factors).requires_grad_()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    low = levels[(levels <= scaled.detach().abs()[..., None]).sum(-1).clamp(max=7) - 1]
    delta = torch.where(low < 2, 0.5, torch.where(low < 4, 1.0, 2.0))
    inner = 2 * (scaled.abs() - low) / delta - 1
    smooth = scaled.sign() * (low + delta / 2 * (1 + inner.sign() * inner.abs().pow(1 / 5)))  # eq. 7
    (slope,) = torch.autograd.grad(smooth.sum(), scaled)
    slope = slope.nan_to_num(3, 3).clamp(max=3)
    torch.testing.assert_close(dw.double(), straight[3].double() * slope, rtol=1e-4, atol=1e-6)
    assert (slope == 3).any()
    assert (slope < 0.5).any()


def uniform(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and the trust mask of QuEST with 16 levels."""
    deviation = x.square().mean(-1, keepdim=True).sqrt()
    step = 2 * 2.513930578568423 * deviation / 15
    levels = torch.arange(-7.5, 8)
    values = levels[(x[..., None] / step[..., None] - levels).abs().argmin(-1)] * step
    return values, (values - x).abs() <= step / 2 * (1 + 1e-6)


def mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and the mask of Quartet's forward pass."""
    blocks = x.view(len(x), -1, 32)
    scale = 2 ** (blocks.std(-1, correction=0, keepdim=True) * 2.92247856 / 6).log2().floor()
    values = fake_quantize((blocks / scale).contiguous(), "e2m1") * scale
    return values.view_as(x), ((blocks / scale).abs() < 6).view_as(x)


@pytest.mark.parametrize(("name", "rounded"), [("quest", uniform), ("quest-mxfp4", mxfp4)])
def test_quests_gradient_is_masked_in_the_rotated_basis(
    name: str, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    chain, again = f"{name} > fp32:rht32:signs=none", "same > fp32"
    x, dy = noisy(48, 64, seed=1) / 100, normal(48, 32, seed=2)
    w, y, dx, dw = run(recipe(chain, chain, "high", again, "high", again, output="fp32"), x, dy)

    turn = fake_quantize(torch.eye(64), "fp32:rht32:signs=none")
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    operands = []
    for leaf in leaves:
        turned = leaf @ turn
        values, mask = rounded(turned.detach())
        assert 0 < mask.float().mean() < 1
        operands.append(turned * mask + (values - turned * mask).detach())
    expected = operands[0] @ operands[1].t()
    expected.backward(dy)
    for ours, theirs in ((y, expected.detach()), (dx, grad_of(leaves[0])), (dw, grad_of(leaves[1]))):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dge", "unknown format 'dge'"),
        (f"{NVFP4} > dge", "a hook is the first stage of a chain"),
        ("dge:n=5 > e2m1:channel:amax", "hook dge: unknown 'n=5': valid are k, most"),
        ("dge:k=five > e2m1:channel:amax", "hook dge: 'k=five': a finite number is expected"),
        ("averis:k=5 > e2m1:channel:amax", "hook averis: unknown 'k=5': valid are no settings"),
        ("averus > e2m1:channel:amax", "hooks are averis, "),
        ("dge:k=nan > e2m1:channel:amax", "finite"),
    ],
)
def test_what_is_no_hook_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict({"fprop": {"w": text}})


@pytest.mark.parametrize("text", [f"dge > {NVFP4}", "dge > e2m1:channel:amax:rht16"])
def test_dge_refuses_scales_whose_grid_it_does_not_know(text: str) -> None:
    x = recipe(text.replace("dge > ", "") if "rht" in text else "high", text, *["high"] * 4)
    with pytest.raises(ValueError, match="dge needs a quantizer with FP32 scales"):
        run(x, normal(8, 32, seed=1), normal(8, 8, seed=2))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder `conf` of a working directory, with a hook of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hooks, "HOOKS", dict(hooks.HOOKS))
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "own_factor.py").write_text("BY = 2.0\n")
    (conf / "hooks.py").write_text(
        "import own_factor\n"
        "from fewbits.models.hooks import Rest, hook\n\n"
        '@hook("halved")\n'
        "def halved(x, rest, *, by=own_factor.BY):\n"
        "    return rest.quantize(x / by) * by\n"
    )
    yield conf
    for name in ("fewbits_own_hooks", "own_factor"):
        sys.modules.pop(name, None)


def test_a_hook_of_the_working_directory_has_a_name_and_is_part_of_the_id(own: Path) -> None:
    chain = "halved:by=3 > e4m3"
    x = normal(8, 32, seed=1) * 700
    w, y, _, _ = run(recipe(chain, *["high"] * 5), x, torch.zeros(8, 8))
    assert torch.equal(y, (fake_quantize(x / 3, "e4m3") * 3) @ w.t())
    assert str(HookStage.parse("halved:by=3")) == "halved:by=3"

    def identified(*more: str) -> dict[str, object]:
        trial, _ = load_trial(["model=gpt2-nano", "recipe=bf16", *more])
        return identity(trial, "data", "cpu")

    used = f'recipe.keep.by="{chain}"'
    before = identified(used)
    assert "hooks" not in identified('recipe.keep.by="dge > e4m3"')
    (own / "own_factor.py").write_text("# a comment\nBY = 2.0\n")
    assert identified(used) == before
    (own / "own_factor.py").write_text("BY = 4.0\n")
    assert identified(used)["hooks"] != before["hooks"]
