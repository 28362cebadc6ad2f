"""Define weights that are sampled with noise, and the gradient of their bit widths (arithmetic.md, "Noise")."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.reference.elements import fold, largest, power_of_two, spread
from fewbits.kernels.reference.noise import Noise, gaussian_noise, uniform_noise, unpack_noise


def exp2(t: Tensor) -> Tensor:
    """Return 2^t as float32 for float64 t: a power of two, times a Taylor polynomial for the remaining factor."""
    n = t.round()
    x = (t - n) * math.log(2)
    polynomial = torch.zeros_like(x)
    for k in range(13, -1, -1):
        polynomial = polynomial * x + 1 / math.factorial(k)
    return (polynomial * power_of_two(n.clamp(-1000, 1000))).float()


def noise_scale(w: Tensor, bits: Tensor, block: int) -> Tensor:
    """Return 2^(1 − b) · max|w| for each square of `block` rows and columns of w, with bit width b (GaussWS eq. 3)."""
    return exp2(1 - bits.double()) * largest(w.float(), (block, block))


def noise_like(w: Tensor, seed: int, noise: Noise) -> Tensor:
    size = w.numel()
    if noise == "gaussian":
        drawn = unpack_noise(gaussian_noise(size, seed, w.device), size)
    else:
        drawn = uniform_noise(size, seed, w.device)
    return drawn.float().view(w.shape)


def sample_weight(w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
    """Return w + R · 2^(1 − b) · max|w| in `dtype`, where R is the noise (GaussWS eq. 3).

    Each square of `block` rows and columns of w has its own bit width b and maximum max|w|.
    """
    scale = spread(noise_scale(w, bits, block), (block, block), w.shape)
    return (w.float() + noise_like(w, seed, noise) * scale).to(dtype)


def sample_weight_backward(grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int) -> Tensor:
    """Return the gradient of the bit widths (GaussWS eq. 4): −ln 2 · s · Σ g·R over each square.

    s = 2^(1 − b) · max|w|, and g = `grad` is the gradient of the sampled weight. arithmetic.md ("Noise") defines the
    order in which the products are summed.
    """
    products = fold(grad.float() * noise_like(w, seed, noise), (block, block))
    columns = torch.zeros_like(products[:, 0])
    for row in products.unbind(1):
        columns = columns + row
    columns = F.pad(columns, (0, block - columns.shape[-1]))
    while columns.shape[-1] > 1:
        left, right = columns.chunk(2, dim=-1)
        columns = left + right
    return (noise_scale(w, bits, block) * -math.log(2)) * columns.squeeze(-1)
