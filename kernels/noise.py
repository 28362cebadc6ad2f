"""Generate the noise of GaussWS and DiffQ, and add it to weights.

The size of the noise on a weight depends on the bit width of the weight's block; gradients of bit widths are computed.
"""

import torch
from torch import Tensor

from fewbits.kernels.api import check_seed
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.gpu import cuda
from fewbits.kernels.backends.protocol import DTYPES
from fewbits.kernels.operators import refuse_distributed
from fewbits.kernels.quantizer import parts_of
from fewbits.kernels.reference import noise as reference
from fewbits.kernels.reference.noise import NOISES, Noise

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


def gaussian_noise(count: int, seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return `count` elements of GaussWS's noise R (eq. 10), which approximates round(N(0,1)/2), packed in int32.

    Each int32 contains eight elements of 4 bits (highest bit: sign; other bits: magnitude). Element i has the four bits
    from bit 4 · (i mod 8) of the int32 number i div 8, and depends only on the seed and on i.
    """
    device = _check_arguments(count, seed, device)
    return backend_for(device.type).gaussian_noise(count, seed, device)


def unpack_noise(words: Tensor, count: int | None = None) -> Tensor:
    """Return the first `count` values (None: all) of packed noise from `gaussian_noise`, as int8 from −2 to 2."""
    if not isinstance(words, Tensor) or words.dtype != torch.int32 or words.dim() != 1:
        raise ValueError(f"expected packed noise, a vector of int32, not {words!r:.60}")
    available = 8 * words.numel()
    count = available if count is None else count
    if not 0 <= count <= available:
        raise ValueError(f"count={count}: valid values are 0 to {available}, the number of values in the packed noise")
    return reference.unpack_noise(words, count)


def uniform_noise(count: int, seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return `count` values of DiffQ's noise R, uniform in (−½, ½), in bfloat16.

    The rounding to bfloat16 can also give ±½.
    """
    device = _check_arguments(count, seed, device)
    return backend_for(device.type).uniform_noise(count, seed, device)


def sample_weight(
    w: Tensor,
    bits: Tensor,
    seed: int,
    *,
    noise: Noise = "gaussian",
    block: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return ŵ = w + R · max|w| · 2^(1 − bits), with max and bits per square block (GaussWS eq. 3), cast to dtype.

    The result is differentiable in w and in bits (eq. 4, with the maximum taken as constant). The backward pass draws R
    again from the seed instead of storing it.

    bits: float32, one bit width for each square of `block` rows and columns of w.
    noise: the distribution of R: gaussian (GaussWS) or uniform (DiffQ).
    """
    refuse_distributed(w)
    if noise not in NOISES:
        raise ValueError(f"noise {noise!r}: valid values are {', '.join(NOISES)}")
    if block not in BLOCKS:
        raise ValueError(f"block {block!r}: valid values are {', '.join(map(str, BLOCKS))}")
    if w.dtype not in DTYPES or dtype not in DTYPES:
        raise ValueError(
            f"w has {w.dtype}, and dtype={dtype}: for each, valid dtypes are {', '.join(map(str, DTYPES))}"
        )
    if w.dim() != 2:
        raise ValueError(f"w has shape {tuple(w.shape)}: expected a matrix")
    grid = parts_of(w.shape, (block, block))
    is_tensor = isinstance(bits, Tensor)
    if not is_tensor or tuple(bits.shape) != grid or bits.dtype != torch.float32 or bits.device != w.device:
        actual = f"{tuple(bits.shape)} {bits.dtype} on {bits.device}" if is_tensor else type(bits).__name__
        raise ValueError(
            f"bits are {actual}: expected {grid} torch.float32 on {w.device}, a bit width for each {block}x{block} "
            "square of w"
        )
    return torch.ops.fewbits.sample_weight(w, bits, check_seed(seed), noise, block, dtype)


def _check_arguments(count: int, seed: int, device: torch.device | str) -> torch.device:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"count={count!r}: expected the number of elements, an integer ≥ 0")
    check_seed(seed)
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: {cuda.complaint()}; the only valid device on this machine is cpu")
    return device
