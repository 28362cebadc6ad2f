"""Define float32 functions, and the order of sums in operators of layers, so that all backends give the same bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

MAGIC = 12582912.0  # 1.5 · 2^23: adding it to a small float32 number rounds the number to an integer


def exponential(x: Tensor) -> Tensor:
    """Return e^x to about 2 units in the last place, as 2^n · e^r with x = n·ln 2 + r; csrc/vector.h does the same.

    ln 2 is split into two constants, so that n times the first constant is exact. 2^n is applied as two factors, so
    that subnormal and infinite results are right; only the multiplication by the second factor can round.
    """
    x = torch.where(x < -104, -104.0, x)
    x = torch.where(x > 89, 89.0, x)
    shifted = x * 1.44269504 + MAGIC
    n = shifted - MAGIC
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    exponent = shifted.view(torch.int32) - 0x4B400000
    first = exponent >> 1
    return (p * _power_of_two(first)) * _power_of_two(exponent - first)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


LANES = 16
BLOCKS = 64  # the largest number of blocks of rows, and the smallest number of rows in a block


def along_rows(x: Tensor) -> Tensor:
    """Return the sums over the last dimension.

    There are 16 partial sums, called lanes. Element i is added to lane i mod 16, in ascending order of i. Then lanes i
    and i + 8 are added, then i and i + 4, i and i + 2, and i and i + 1.
    """
    lanes = F.pad(x, (0, -x.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    sums = torch.zeros_like(lanes[..., 0, :])
    for vector in lanes.unbind(-2):
        sums = sums + vector
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return sums[..., 0]


def over_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows x[0], x[1] and so on.

    The rows are divided into blocks of max(64, ceil(rows / 64)) rows; the last block may be smaller. First the rows of
    each block are added in order, then the sums of the blocks.
    """
    size = max(BLOCKS, -(-len(x) // BLOCKS))
    missing = x.new_zeros((-len(x) % size, *x.shape[1:]))
    blocks = torch.cat((x, missing)).unflatten(0, (-1, size))
    partial = torch.zeros_like(blocks[:, 0])
    for row in blocks.unbind(1):
        partial = partial + row
    total = torch.zeros_like(x.new_empty(x.shape[1:]))
    for block in partial:
        total = total + block
    return total
