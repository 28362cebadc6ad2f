"""Compare quantizers and recipes with the arithmetic of published code, written here in plain torch.

- torchao 0.18 (`nvfp4_reference.py` of its tests): NVFP4 training, in TransformerEngine's order of operations
- Quartet II (repository IST-DASLab/Quartet-II): `round_four_six.cu`, and `eden_1x16s_fp4_kernel` in `quartet_2.py`
- TetraJet-v2 (repository thu-ml/TetraJet-v2-NVFP4Training): `quant_fp4.cu`, with the factor 17/16 of block scales
  that `tetrajetv2.py` of Quartet II's repository has

Random numbers are ours. Scales round in other orders than ours, so a few results may lie on the other side of a tie.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.packed import encode
from fewbits.kernels.reference.noise import uniform
from fewbits.kernels.reference.rotation import TE_SIGNS
from fewbits.kernels.seeds import derive_seed
from fewbits.models.recipe import SLOTS
from tests.models.quantized import noisy, normal
from tests.models.test_hooks import run


def nearest(v: Tensor) -> Tensor:
    return torch.from_numpy(v.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def e4m3(scales: Tensor) -> Tensor:
    return scales.clamp(max=448).to(torch.float8_e4m3fn).float()


def torchao(x: Tensor, tall: int) -> tuple[Tensor, Tensor]:
    """Return the values and the block scales of `nvfp4_reference_quantize`, for blocks of `tall` x 16."""
    x = x.float()
    enc = torch.tensor(448 * 6.0) / x.abs().max()
    scales = e4m3(x.abs().view(len(x) // tall, tall, -1, 16).amax((1, 3)) * (enc * (1.0 / 6.0)))
    factors = (1 / (scales * (1 / enc))).clamp(max=torch.finfo(torch.float32).max)
    factors, back = (f.repeat_interleave(tall, 0).repeat_interleave(16, 1) for f in (factors, scales))
    return nearest(x * factors) * back * (1 / enc), scales


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tall", [1, 16])
def test_operands_of_the_forward_pass_are_those_of_torchao(tall: int, transposed: bool) -> None:
    x = noisy(64, 256, seed=1, dtype=torch.bfloat16)
    x = x.t().contiguous() if transposed else x
    values, scales = torchao(x, tall)
    packed = encode(x, f"e2m1:{tall}x16:nvfp4")
    assert packed.scales is not None
    assert torch.equal(packed.scales.view(torch.float8_e4m3fn).float(), scales)
    assert torch.equal(fake_quantize(x.float(), f"e2m1:{tall}x16:nvfp4"), values)


def test_a_chain_that_rounds_the_rotated_values_to_bf16_is_torchaos_operand_of_wgrad() -> None:
    x = (normal(64, 256, seed=2) * 40).round().clamp(-255, 255) / 64  # sums of 16 are exact
    matrix = torch.diag(torch.tensor(TE_SIGNS).float()) @ torch.from_numpy(hadamard(16)).float() / 4
    turned = (x.t().reshape(-1, 16) @ matrix).view(256, 64).bfloat16()
    assert not torch.equal(turned.float(), (x.t().reshape(-1, 16) @ matrix).view(256, 64))
    ours = fake_quantize(fake_quantize(x, "bf16:rht16", axis=0), "e2m1:1x16:nvfp4", axis=0)
    assert torch.equal(ours.t(), torchao(turned, 1)[0])


def noise(part: Tensor, draws: Tensor) -> Tensor:
    """Return numbers in ±1/2 whose sums with `part`, a place between two values, exceed 1/2 where ours round up.

    Ours leave the nearest value if the draw is below the distance to it.
    """
    return torch.where(part <= 0.5, 0.5 - draws, draws - 0.5)


def four_six(x: Tensor) -> Tensor:
    """Return the values of `four_six_fp4_kernel`."""
    scale, blocks = x.abs().max() / 256 / 6, x.view(-1, 16)
    best, least = torch.zeros_like(blocks), torch.full((len(blocks), 1), torch.inf)
    for top in (6.0, 4.0):
        s8 = e4m3(blocks.abs().amax(1, keepdim=True) / top / scale)
        values = nearest(blocks * (1 / (s8 * scale))) * (s8 * scale)
        error = (blocks - values).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, values, best), torch.minimum(error, least)
    return best.view_as(x)


def eden(turned: Tensor, draws: Tensor, shared: int = 1) -> Tensor:
    """Return the values of `eden_1x16s_fp4_kernel`, which corrects the scales of `shared` blocks, a rotation, alike."""
    blocks, top = turned.reshape(-1, 16), 6.0 / ((17 / 16) * 0.93)
    scale = blocks.abs().max() / 255.99 / top
    s8 = e4m3(blocks.abs().amax(1, keepdim=True) / top / scale)
    v = blocks / (s8 * scale)
    q = nearest(v)
    squares, products = (p.view(-1, shared * 16).sum(1).repeat_interleave(shared)[:, None] for p in (v * v, v * q))
    corrected = s8 * (squares / products)
    codes = corrected.to(torch.float8_e4m3fn).view(torch.uint8).int()
    down, here, up = ((codes + step).to(torch.uint8).view(torch.float8_e4m3fn).float() for step in (-1, 0, 1))
    low, high = torch.where(here > corrected, down, here), torch.where(here > corrected, here, up)
    chance = (corrected - low) / (high - low)
    drawn = torch.where(0.5 - noise(chance, draws[:, None]) < chance, high, low)
    return (q * drawn * scale).view_as(turned)


def tetrajet(x: Tensor, draws: Tensor | None = None, top: float = 6.0) -> Tensor:
    """Return the values of `nvfp4_double_quant`; draws: random numbers in [0, 1) for stochastic rounding."""
    blocks = x.reshape(-1, 8, 16)
    outer = blocks.abs().amax((1, 2), keepdim=True) / 448 / top
    scale = e4m3(blocks.abs().amax(2, keepdim=True) / outer / top) * outer
    v = blocks * (1 / scale)
    if draws is not None:
        size = v.abs()
        gap = torch.where(size <= 2, 0.5, torch.where(size <= 4, 1.0, 2.0))
        low, high = (torch.where(gap == 0.5, a, torch.where(gap == 1, b, c)) for a, b, c in ((0, 2, 4), (2.0, 4, 6)))
        r = noise(size / gap % 1, draws.reshape(v.shape))
        v = torch.minimum(torch.maximum(size + r * gap, low), high).float().copysign(v)
    return (nearest(v) * scale).view_as(x)


def wide(seed: int) -> Tensor:
    """Return values of many magnitudes, but no block whose scale underflows."""
    return normal(64, 256, seed=seed) * normal(64, 256, seed=seed + 10).exp()


def turn(x: Tensor, size: int, signs: int) -> Tensor:
    """Rotate the rows of x as `fewbits` does with these signs."""
    return x @ fake_quantize(torch.eye(x.shape[-1]), f"fp32:rht{size}:signs={signs}")


def blocks_apart(ours: Tensor, theirs: Tensor, near: float) -> float:
    """Return the fraction of blocks with values that differ by more than the fraction `near` of theirs."""
    return float(((ours - theirs).abs() > near * theirs.abs()).view(-1, 16).any(1).float().mean())


def test_four_over_six_is_quartets_forward_pass() -> None:
    x = wide(seed=3)
    assert blocks_apart(fake_quantize(x, "e2m1:1x16:fouroversix"), four_six(x), 1e-6) <= 0.002
    assert blocks_apart(fake_quantize(x, "e2m1:1x16:nvfp4"), four_six(x), 1e-6) > 0.2


def test_eden_is_quartets_backward_pass() -> None:
    """The target of block scales is 256 instead of 255.99, so values differ by 4e-5 of themselves."""
    x, draws = normal(64, 256, seed=4), uniform(1024, 9, torch.device("cpu")).float()
    for size in (16, 128):
        ours, turned = fake_quantize(x, f"e2m1:1x16:eden:rht{size}:signs=5", seed=9), turn(x, size, 5)
        theirs = eden(turned, draws, size // 16)
        if size == 16:  # a rotation of several blocks has one correction there, and one for each block here
            assert blocks_apart(ours, theirs, 1e-4) <= 0.02
        errors = [float((y - turned).norm()) for y in (ours, theirs)]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize("stochastic", [False, True])
def test_groups_of_128_are_tetrajets_double_scales(stochastic: bool) -> None:
    x, text = wide(seed=5), "e2m1:1x16:nvfp4:group=128"
    draws = uniform(x.numel(), 7, x.device) if stochastic else None
    text, top = (f"{text}:stochastic:factor=16/17", 6 * 16 / 17) if stochastic else (text, 6.0)
    assert blocks_apart(fake_quantize(x, text, seed=7), tetrajet(x, draws, top), 1e-6) <= 0.002


@pytest.mark.parametrize("name", ["quartet-ii", "tetrajet-v2"])
def test_the_backward_pass_requantizes_the_values_of_the_forward_pass(name: str) -> None:
    x, dy = normal(128, 128, seed=1), normal(128, 128, seed=2)
    spec = load_recipe(name, {"rht": 16} if name == "quartet-ii" else {})
    w, y, dx, dw = run(spec, x, dy)
    first = four_six if name == "quartet-ii" else tetrajet
    x4, w4 = first(x), first(w)

    def again(tensor: Tensor, slot: str, gemm: int) -> Tensor:
        """Quantize rows as the slot does, rotated; ours draws numbers by the places of elements in the tensor."""
        seed, signs = derive_seed(0, 0, 0, 0, 0, SLOTS.index(slot)), derive_seed(0, 0, 0, 0, 0, len(SLOTS) + 1 + gemm)
        transposed = slot != "dgrad.dy"
        if name == "quartet-ii":
            blocks = uniform(tensor.numel() // 16, seed, torch.device("cpu")).float()
            blocks = blocks.view(8, 128).t().flatten() if transposed else blocks
            return eden(turn(tensor, 16, signs), blocks)
        draws = uniform(tensor.numel(), seed, torch.device("cpu")).view(128, 128)
        return tetrajet(turn(tensor, 32, signs), draws.t() if transposed else draws, 6 * 16 / 17)

    pairs = {
        "y": (y, x4 @ w4.t()),
        "dx": (dx, again(dy, "dgrad.dy", 1) @ again(w4.t(), "dgrad.w", 1).t()),
        "dw": (dw, again(dy.t(), "wgrad.dy", 2) @ again(x4.t(), "wgrad.x", 2).t()),
    }
    for key, (ours, theirs) in pairs.items():
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02, key
