"""Define the order in which the operators of layers add float32 numbers, so that all backends give the same bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
