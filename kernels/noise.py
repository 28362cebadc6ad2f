"""Noise on weights (GaussWS, DiffQ): packed generators, and the weight they perturb with the gradient of its bits."""

from typing import Literal

import torch
from torch import Tensor

from fewbits.kernels import ops
from fewbits.kernels.api import check_seed
from fewbits.kernels.backends import cuda, reference
from fewbits.kernels.backends.choice import backend_for

NOISES = ("gaussian", "uniform")
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


def gaussian_noise(count: int, seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """R of GaussWS eq. 10, nearly round(N(0,1)/2), packed: int32 words of eight sign-and-magnitude nibbles.

    Element i is nibble i mod 8 of word i div 8 and depends on the seed and i alone.
    """
    device = _checked(count, seed, device)
    return backend_for(device.type).gaussian_noise(count, seed, device)


def unpack_noise(words: Tensor, count: int | None = None) -> Tensor:
    """The int8 values, −2 … 2, of packed noise."""
    if not isinstance(words, Tensor) or words.dtype != torch.int32 or words.dim() != 1:
        raise ValueError(f"packed noise is a vector of int32 words, not {words!r:.60}")
    available = 8 * words.numel()
    count = available if count is None else count
    if not 0 <= count <= available:
        raise ValueError(f"count={count}: these words hold {available} values")
    return reference.unpack_noise(words, count)


def uniform_noise(count: int, seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """DiffQ's R: uniform on [−½, ½], in bfloat16 (whose rounding reaches the ends)."""
    device = _checked(count, seed, device)
    return backend_for(device.type).uniform_noise(count, seed, device)


def sample_weight(
    w: Tensor,
    bits: Tensor,
    seed: int,
    *,
    noise: Literal["gaussian", "uniform"] = "gaussian",
    block: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """ŵ = w + R · max|w| · 2^(1 − bits), max and bits per square block (GaussWS eq. 3), cast to dtype.

    Differentiable in w and in bits (eq. 4, the maximum taken as constant); R is drawn again from the seed in backward
    rather than kept.
    """
    if noise not in NOISES:
        raise ValueError(f"noise {noise!r}: valid are {', '.join(NOISES)}")
    if block not in BLOCKS:
        raise ValueError(f"block {block!r}: valid are {', '.join(map(str, BLOCKS))}")
    valid = ops.DTYPES[:3]
    if w.dtype not in valid or dtype not in valid:
        raise ValueError(f"w is {w.dtype}, dtype {dtype}: valid are {', '.join(map(str, valid))}")
    if w.dim() != 2:
        raise ValueError(f"w has shape {tuple(w.shape)}: a matrix is expected")
    grid = tuple(-(-n // block) for n in w.shape)
    is_tensor = isinstance(bits, Tensor)
    if not is_tensor or tuple(bits.shape) != grid or bits.dtype != torch.float32 or bits.device != w.device:
        found = f"{tuple(bits.shape)} {bits.dtype} on {bits.device}" if is_tensor else type(bits).__name__
        raise ValueError(
            f"bits are {found}: expected {grid} torch.float32 on {w.device}, one for each {block}x{block} square of w"
        )
    return torch.ops.fewbits.sample_weight(w, bits, check_seed(seed), noise, block, dtype)


def _checked(count: int, seed: int, device: torch.device | str) -> torch.device:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"count={count!r}: the number of elements, an integer from 0 up")
    check_seed(seed)
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: {cuda.complaint()}; valid here is cpu")
    return device
