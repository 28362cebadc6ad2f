"""Split a matrix into parts (blocks or decision blocks), and expand one value per part to the elements."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Part = tuple[int, int]  # rows and columns of a part


def fold(x: Tensor, part: Part, fill: float = 0) -> Tensor:
    """Reshape [rows, cols] to [parts down, rows of a part, parts across, columns of a part]; pad edges with `fill`."""
    r, c = (min(size, max(n, 1)) for size, n in zip(part, x.shape, strict=True))
    padded = F.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r), value=fill)
    return padded.reshape(padded.shape[0] // r, r, padded.shape[1] // c, c)


def spread(grid: Tensor, part: Part, shape: Sequence[int]) -> Tensor:
    """Expand `grid`, one value per part, to a matrix of this shape: each element gets the value of its part."""
    row, column = (torch.arange(n, device=grid.device) // size for n, size in zip(shape, part, strict=True))
    return grid[row[:, None], column]


def largest(x: Tensor, part: Part) -> Tensor:
    """Return the largest magnitude in each part of a float32 matrix, compared as bits: finite < inf < NaN."""
    magnitudes = x.view(torch.int32) & 0x7FFFFFFF
    return fold(magnitudes, part).amax((1, 3)).view(torch.float32)
