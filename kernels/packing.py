"""Define how packed storage lays out codes and scales in memory (arithmetic.md, "Packed storage").

`layout` holds for all backends, and the compiled backends call `allocate`. Only backends/reference.py uses the other
functions, which are written for clarity, not speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.quantizer import Quantizer, parts_of

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def layout(q: Quantizer, axis: int, rows: int, cols: int) -> Layout:
    """Return three pairs (shape, dtype): for the codes, block scales and group scales of a matrix [rows, cols].

    If q has no block scales or no group scales, their shape has no elements. A group is the set of blocks that share a
    second-level value, the group scale (`Quantizer.group`).
    """
    if q.traits.kind == "affine":
        raise ValueError(f"{q}: values with zero points have no packed storage: use another scaling, such as amax")
    grid = (0, 0) if q.scaling == "none" else parts_of((rows, cols), q.block.resolve((rows, cols), axis))
    scale = torch.float32 if q.traits.kind == "float" else torch.uint8
    return ((rows, q.format.row_bytes(cols)), torch.uint8), (grid, scale), ((q.groups(grid, axis),), torch.float32)


def allocate(q: Quantizer, axis: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the codes, block scales and group scales for x; only the group scales are initialised, to 1.

    The groups of an empty matrix have no blocks, so their scales stay 1.
    """
    codes, scales, groups = (
        torch.empty(size, dtype=dtype, device=x.device) for size, dtype in layout(q, axis, *x.shape)
    )
    return codes, scales, groups.fill_(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, cols] of `bits` bits into bytes: eight codes make `bits` bytes, least significant bit first.

    Codes of 9 to 16 bits take two bytes each.
    """
    rows, cols = codes.shape
    if bits > 8:
        return codes.to(torch.int16).view(torch.uint8).view(rows, 2 * cols)
    padded = F.pad(codes, (0, -cols % 8)).view(rows, (cols + 7) // 8, 8).long()
    words = (padded << torch.arange(8, device=codes.device) * bits).sum(-1)
    packed = words[..., None] >> torch.arange(bits, device=codes.device) * 8 & 0xFF
    return packed.to(torch.uint8).flatten(1)[:, : (cols * bits + 7) // 8].contiguous()


def unpack(data: Tensor, bits: int, cols: int) -> Tensor:
    """Return the int32 codes [rows, cols] that `pack` packed into the bytes `data`."""
    rows = data.shape[0]
    if bits > 8:
        return data.contiguous().view(torch.int16).view(rows, cols).to(torch.int32) & (1 << bits) - 1
    padded = F.pad(data, (0, -data.shape[1] % bits)).view(rows, (cols + 7) // 8, bits).long()
    words = (padded << torch.arange(bits, device=data.device) * 8).sum(-1)
    codes = words[..., None] >> torch.arange(8, device=data.device) * bits & (1 << bits) - 1
    return codes.to(torch.int32).flatten(1)[:, :cols]


def stored_scales(codes: Tensor, q: Quantizer) -> Tensor:
    """Return the stored form of int32 codes of block scales: for most scalings, the same codes as uint8.

    For `amax`, a code is the bits of a float32 scale, which is returned. For `none`, the result is empty.
    """
    if q.scaling == "none":
        return codes.new_empty((0, 0), dtype=torch.uint8)
    return codes.view(torch.float32) if q.traits.kind == "float" else codes.to(torch.uint8)


def scale_codes(scales: Tensor) -> Tensor:
    return scales.view(torch.int32) if scales.dtype == torch.float32 else scales.to(torch.int32)
