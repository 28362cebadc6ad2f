"""Divide a matrix into tiles, one for each CTA (thread block), so that each block lies within one tile if possible."""

import ctypes
from typing import NamedTuple

from torch import Tensor

from fewbits.kernels.backends.protocol import Part
from fewbits.kernels.quantizer import Quantizer, parts_of

EDGE = 8  # the number of rows, and of columns, of the patch of a matrix that one thread has in its registers
WARP = 32  # threads of a warp
COLUMNS = 4  # the value of Piece in csrc/spec.cuh for blocks that are columns
THREADS = 256  # threads of a usual CTA
LONGEST_ROW = 64 * THREADS  # the longest row, in columns, that the threads of one CTA can have in their registers
TALL_THREADS = 512  # threads of the largest CTA whose tile consists of whole columns, sixteen side by side
SECTOR = 32  # the smallest number of bytes that a GPU transfers; also the bytes of a row of a strip (`strip_shape`)
TWO_STRIPS = 4096  # the largest number of rows for which two strips fit in the shared memory of a multiprocessor
FEWEST_STRIPS = 64  # half of the multiprocessors of an H100: with fewer strips, too many multiprocessors would be idle
STATIC_SHARED = 3 << 10  # bytes of shared memory that are reserved for the variables that kernels declare themselves
MOST = (1 << 31) - (1 << 15)  # the number of rows, and of columns, must be below this, because kernels use 32 bits


class Shape(NamedTuple):
    """The shape of the tile of a matrix that one CTA processes.

    threads: the number of threads of the CTA. Each has EDGE * EDGE elements: if `along` is 0, a patch of EDGE rows and
        EDGE columns; if `along` is 1, EDGE groups of EDGE neighbouring elements of the row.
    lanes: the number of threads that lie side by side along a row of the tile.
    along: 1 if the tile is a single row, which is divided among all threads; else 0.
    """

    threads: int
    lanes: int
    along: int = 0

    @property
    def rows(self) -> int:
        return 1 if self.along else self.threads // self.lanes * EDGE

    @property
    def cols(self) -> int:
        return self.threads * EDGE * EDGE if self.along else self.lanes * EDGE

    def bytes(self, itemsize: int) -> int:
        return self.threads * EDGE * EDGE * itemsize


class Parts(ctypes.Structure):  # csrc/spec.cuh
    _fields_ = [(name, ctypes.c_int32) for name in ("rows", "cols", "across", "lanes", "groups")]


def _next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def usual_shape(x: Tensor) -> Shape:
    """Return the default tile: 128x128 for 256 threads; narrower and taller if the matrix is narrow."""
    return Shape(THREADS, min(2 * EDGE, _next_power_of_two(-(-x.shape[1] // EDGE))))


def block_on_chip(q: Quantizer, axis: int, x: Tensor, shape: Shape) -> Part | None:
    """Return the rows and columns of a block in tiles of this shape, or None if a block does not fit in a tile.

    A quantizer without a scaling has no blocks, so eight neighbouring elements of a row count as a block. If a block
    covers a whole dimension of the matrix, the returned size is a power of two that may exceed the matrix. For Four
    Over Six, a block with more rows than one warp covers does not fit. The reason is that a warp has to compare the two
    candidate scales of a block.
    """
    if q.scaling == "none":
        return (1, EDGE)
    sides = []
    for size, have, tile in zip(q.block.resolve(x.shape, axis), x.shape, (shape.rows, shape.cols), strict=True):
        size = _next_power_of_two(size) if size >= have else size
        if size & (size - 1) or (size >= have and _next_power_of_two(have) > tile) or (size < have and size > tile):
            return None
        sides.append(min(size, tile))
    if q.traits.compares and sides[0] > WARP // shape.lanes * EDGE:
        return None
    return sides[0], sides[1]


def fitting_shape(x: Tensor, q: Quantizer, axis: int) -> Shape:
    """Return the tile shape for quantizing x by q: `usual_shape`, or a tile of one whole row or 16 whole columns of x.

    If the blocks of q do not fit in the usual tile, but are whole rows (or columns) of x that fit in the registers of
    one CTA, a tile is one such row (or 16 such columns). In all other cases, and always for the scaling Four Over
    Six, the result is `usual_shape`.
    """
    usual, (rows, cols) = usual_shape(x), x.shape
    if q.traits.compares or block_on_chip(q, axis, x, usual):
        return usual
    r, c = q.block.resolve(x.shape, axis)
    if r == 1 and c >= cols and cols <= LONGEST_ROW:
        threads = max(WARP, _next_power_of_two(-(-cols // EDGE**2)))
        return Shape(threads, threads, along=1)
    tall = Shape(max(2 * THREADS // EDGE, 2 * _next_power_of_two(-(-rows // EDGE))), 2)
    if c == 1 and r >= rows and tall.threads <= TALL_THREADS:
        return tall
    return usual


def strip_shape(x: Tensor) -> Shape:
    """Return the shape of the tiles into which a strip is divided.

    A strip is a few whole columns of x, which one CTA processes tile by tile (csrc/strip.cuh). The tiles of a strip are
    as wide as the strip.

    The shared memory of an H100's multiprocessor has space for two strips of up to 4096 rows, or for one taller strip.
    CTAs have 256 threads in the first case and 512 in the second, so a multiprocessor runs 512 threads in both.
    """
    return Shape(THREADS if x.shape[0] <= TWO_STRIPS else TALL_THREADS, SECTOR // (EDGE * x.itemsize))


def divides_into_strips(x: Tensor, q: Quantizer, axis: int) -> bool:
    """Tell whether a matrix is quantized in one launch, in which each CTA processes a strip (a few whole columns).

    The conditions are: blocks are whole columns that are too long for a tile; a block's scale depends only on its own
    amax; and the matrix has enough columns to occupy a GPU. Otherwise blocks that do not fit in a tile need a first
    launch, which computes the amaxes.
    """
    rows, cols = q.block.resolve(x.shape, axis)
    whole_columns = q.scaling != "none" and cols == 1 and rows >= x.shape[0] > TALL_THREADS // 2 * EDGE
    independent = not q.traits.groups and not q.traits.compares
    return whole_columns and independent and -(-x.shape[1] // strip_shape(x).cols) >= FEWEST_STRIPS


def tiles_kept(x: Tensor, shape: Shape, room: int) -> int:
    """Return how many tiles of a strip are kept in `room` bytes of shared memory.

    A strip is a few whole columns of x, which one CTA processes tile by tile. The result does not count the last tile
    of the strip, because this tile stays in registers.
    """
    return min(-(-x.shape[0] // shape.rows) - 1, room // shape.bytes(x.itemsize))


def covers_columns(x: Tensor, part: Part, shape: Shape) -> bool:
    """Tell whether blocks of the size `part` are one column wide, and each column of a tile lies within one block.

    Kernels have a special case for such blocks: the value COLUMNS of Piece in csrc/spec.cuh.
    """
    rows, cols = part
    return cols == 1 and not shape.along and (rows >= x.shape[0] or rows % shape.rows == 0)


def tile_count(x: Tensor, shape: Shape) -> int:
    down, across = parts_of(x.shape, (shape.rows, shape.cols))
    return down * across


def parts_in(x: Tensor, part: Part, shape: Shape) -> tuple[int, Parts]:
    """Return (piece, Parts) for a matrix that is divided into parts of the size `part` (rows, columns).

    The parts are blocks, or parts for which statistics or extreme values are computed. `piece` says which piece of a
    tile is the largest that always lies within one part: 0 for the tile, 1 for the patch of a thread, 2 for a row of
    such a patch (a vector), 3 for an element (Piece in csrc/spec.cuh). Parts has the size of a part, the number of
    parts side by side (`across`), and how many threads of a warp lie within one part: along a row (`lanes`), and down
    the rows (`groups`).
    """
    (rows, cols), (r, c) = x.shape, part
    all_rows, all_cols = r >= rows, c >= cols
    tiles, patches, vectors, elements = range(4)
    lanes = WARP if shape.along else shape.lanes
    groups = WARP // lanes
    if (all_rows or r % shape.rows == 0) and (all_cols or c % shape.cols == 0):
        piece = tiles
    elif not all_cols and c % EDGE:
        piece = elements
    else:
        lanes = lanes if all_cols else min(lanes, power_of_two_factor(c // EDGE))
        piece = vectors if shape.along or not (all_rows or r % EDGE == 0) else patches
        groups = groups if all_rows else min(groups, power_of_two_factor(r // EDGE)) if r % EDGE == 0 else 1
    return piece, Parts(min(r, MOST), min(c, MOST), -(-cols // c), lanes, groups)


def power_of_two_factor(n: int) -> int:
    """Return the largest power of two that divides n."""
    return n & -n
