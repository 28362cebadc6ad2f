"""Define the random Hadamard transform (arithmetic.md, "Rotation")."""

import math

import torch
from torch import Tensor

from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.noise import philox

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_signs(q: Quantizer, device: torch.device) -> Tensor:
    if q.signs == "te":
        return torch.tensor(TE_SIGNS, dtype=torch.float32, device=device)
    if q.signs == "none":
        return torch.ones(128, device=device)
    assert isinstance(q.signs, int)
    four = philox(torch.zeros((), dtype=torch.int64, device=device), 3, q.signs)
    bits = four[:, None] >> torch.arange(32, device=device) & 1
    return 1 - 2 * bits.flatten().float()


def hadamard(x: Tensor) -> Tensor:
    """Multiply vectors along the last dimension, of length 2^k, by the orthonormal Hadamard matrix of this size.

    The factor 2^-floor(k/2) of the matrix is applied first, to avoid overflow.
    """
    size = x.shape[-1]
    k = size.bit_length() - 1
    x = x * 2.0 ** -(k // 2)
    for distance in (1 << j for j in range(k)):
        a, b = x.unflatten(-1, (size // (2 * distance), 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return x * math.sqrt(0.5) if k % 2 else x


def rotate(x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
    """Multiply chunks of q.hadamard values along the axis by S·H (NVFP4 eq. 6), or by its inverse H·S.

    S is diagonal and has the random signs, H is the Hadamard matrix. Values that do not fill a chunk are multiplied in
    smaller chunks. The result has the dtype of x; it is x if q has no Hadamard transform.
    """
    if q.hadamard is None:
        return x
    lines = (x if axis == -1 else x.t()).float()
    signs = hadamard_signs(q, x.device)
    length = lines.shape[1]
    rotated, start, size = [], 0, q.hadamard
    while size:  # first the whole chunks, then the rest in chunks of halved sizes
        count = (length - start) // size
        chunks = lines[:, start : start + count * size].unflatten(1, (count, size))
        own_signs = signs[start % q.hadamard :][:size]
        chunks = hadamard(chunks) * own_signs if inverse else hadamard(chunks * own_signs)
        rotated.append(chunks.flatten(1))
        start, size = start + count * size, size // 2
    y = torch.cat(rotated, dim=1)
    return (y if axis == -1 else y.t()).to(x.dtype).contiguous()
