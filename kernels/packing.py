"""Define how packed storage and operands lay out codes and scales in memory (arithmetic.md, "Packed storage").

`layout` and `operand_layout` hold for all backends, and the compiled backends call `allocate`. Only
backends/reference.py uses the other functions, which are written for clarity, not speed.

An operand is a tensor as torch's scaled products read it. A line is a row of the tensor, or, for axis 0, a column: so
codes always lie along the sum, and codes of axis 0 are transposed. Scales are those by which codes are multiplied:

- Scales of one byte are in the order that cuBLAS calls the 128x4 layout and torch SWIZZLE_32_4_4 (`swizzled`), one for
  each line and block along the sum: those of square blocks are repeated for each of their lines.
- FP32 scales are [1, 1] for the block `tensor`; [blocks along the sum, lines] if a block is a part of one line; and
  otherwise [blocks across the lines, blocks along the sum], where the last size is padded to a multiple of 4.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

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


class OperandLayout(NamedTuple):
    """How the operand of a matrix is stored: the Layout, and the places of scales, which kernels compute from strides.

    The scale of block j of line i is number `line_stride` · i + `block_stride` · j. In swizzled scales it is the place
    that `swizzle` returns for (i, j) and `block_stride` tiles side by side. In FP32 scales, i is the number of a block.
    """

    stored: Layout
    line_stride: int
    block_stride: int
    padded: bool  # there are scales that belong to no block; they are 0


def operand_layout(q: Quantizer, axis: int, rows: int, cols: int) -> OperandLayout:
    lines, length = (rows, cols) if axis == -1 else (cols, rows)
    block = q.block.resolve((rows, cols), axis)
    tall, wide = block if axis == -1 else block[::-1]
    down, along = parts_of((lines, length), (tall, wide))
    line_stride, block_stride, size = 0, 0, (1, 1)
    if q.traits.kind != "float":
        block_stride, size = -(-along // 4), (-(-lines // 128) * 128, -(-along // 4) * 4)
        down = lines
    elif tall == 1:
        line_stride, block_stride, size = 1, lines, (along, lines)
    elif str(q.block) != "tensor":
        line_stride, block_stride, size = -(-along // 4) * 4, 1, (down, -(-along // 4) * 4)
    scale = torch.float32 if q.traits.kind == "float" else torch.uint8
    tensor_scales = int(bool(q.traits.groups))
    codes = (lines, q.format.row_bytes(length))
    stored = (codes, torch.uint8), (size, scale), ((tensor_scales,), torch.float32)
    return OperandLayout(stored, line_stride, block_stride, math.prod(size) != down * along)


def allocate(q: Quantizer, axis: int, x: Tensor, operand: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the codes, block scales and group scales for x, in packed storage or as an operand.

    Only the group scales are initialised, to 1, because the groups of an empty matrix have no blocks; and padded block
    scales, to 0.
    """
    places = operand_layout(q, axis, *x.shape) if operand else None
    codes, scales, groups = (
        torch.empty(size, dtype=dtype, device=x.device)
        for size, dtype in (places.stored if places else layout(q, axis, *x.shape))
    )
    if places and places.padded:
        scales.zero_()
    return codes, scales, groups.fill_(1)


def swizzle(lines: int, blocks: int, device: torch.device) -> Tensor:
    """Return the place of the scale of each line and block along the sum in swizzled memory, [lines, blocks].

    A tile of 512 bytes has the scales of 128 lines and 4 blocks: 16 bytes for the lines i, i + 32, i + 64 and i + 96.
    """
    line, block = torch.arange(lines, device=device)[:, None], torch.arange(blocks, device=device)
    tile = line // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4


def operand_scales(scales: Tensor, q: Quantizer, axis: int, shape: Sequence[int]) -> Tensor:
    """Return the block scales of a matrix of this shape as those of its operand.

    scales: [blocks down, blocks across], as `stored_scales` returns them; FP32 scales are divided by, so the operand
    has their reciprocals.
    """
    places = operand_layout(q, axis, *shape)
    (lines, _), (size, dtype) = places.stored[0][0], places.stored[1]
    result = torch.zeros(math.prod(size), dtype=dtype, device=scales.device)
    scales = scales if axis == -1 else scales.t()
    if dtype == torch.float32:
        down, along = (torch.arange(n, device=scales.device) for n in scales.shape)
        at, scales = places.line_stride * down[:, None] + places.block_stride * along, scales.reciprocal()
    else:
        tall = q.block.resolve(shape, axis)[0 if axis == -1 else 1]
        at, scales = swizzle(lines, scales.shape[1], scales.device), scales.repeat_interleave(tall, 0)[:lines]
    result[at.flatten()] = scales.flatten()
    return result.view(size)


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
