"""Check at which addresses threads access the elements of large matrices, without allocating the matrices.

The kernels use 32-bit numbers for rows and columns, and 64-bit numbers for indices of elements, bytes and parts,
because a matrix may have more than 2^31 elements.
"""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch

from fewbits.kernels.backends import build
from fewbits.kernels.backends.gpu.tiles import EDGE, MOST, Parts, Shape, parts_in, tile_count, usual_shape
from tests.kernels.backends.gpu.emulated import SIMT, compiled

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")


class Question(ctypes.Structure):  # simt/places.cpp
    _fields_ = [
        ("shape", ctypes.c_int32 * 3),
        ("parts", Parts),
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "backwards", "thread", "slot", "width")],
        *[(name, ctypes.c_uint32) for name in ("blocks", "block", "row_bytes")],
    ]


class Answer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("row", "col", "valid", "index", "offset", "part", "byte")]


# Matrices: (rows, columns, shape of tiles; None: the usual shape).
LARGE: tuple[tuple[int, int, Shape | None], ...] = (
    (50_000, 70_008, None),
    (MOST - 1, 24, None),
    (24, MOST - 1, None),
    (300_001, 16_384, Shape(256, 256, along=1)),
    (MOST - 1, 16, Shape(512, 2)),
)
WIDTH = 16  # bits of a code


@pytest.mark.parametrize(("rows", "cols", "own"), LARGE)
@pytest.mark.parametrize("part", [(1, 16), (128, 128), (MOST, 1)])
def test_elements_beyond_the_first_two_thousand_million(
    rows: int, cols: int, own: Shape | None, part: tuple[int, int]
) -> None:
    library = compiled(SIMT / "places.cpp")
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="meta")
    shape = own or usual_shape(x)
    blocks, (_, parts) = tile_count(x, shape), parts_in(x, part, shape)
    across, largest = -(-cols // shape.cols), 0
    for block, thread, slot, backwards in product(
        (0, blocks // 2, blocks - 1), (0, 33, shape.threads - 1), (0, 7), (0, 1)
    ):
        row_bytes = cols * WIDTH // 8
        question = Question(
            *(tuple(shape), parts, rows, cols, backwards, thread, slot, WIDTH, blocks, block, row_bytes)
        )
        answer = Answer()
        library.place(ctypes.byref(question), ctypes.byref(answer))
        number = blocks - 1 - block if backwards else block
        if shape.along:
            row, col = number, (slot * shape.threads + thread) * EDGE
        else:
            row = number // across * shape.rows + thread // shape.lanes * EDGE + slot
            col = number % across * shape.cols + thread % shape.lanes * EDGE
        assert (answer.row, answer.col) == (row, col)
        inside = row < rows and col < cols
        assert answer.valid == (min(cols - col, EDGE) if inside else 0)
        if inside:
            assert answer.index == row * cols + col
            assert answer.offset == 2 * slot * (shape.threads * EDGE if shape.along else cols)
            assert answer.part == row // part[0] * -(-cols // part[1]) + col // part[1]
            assert answer.byte == row * row_bytes + col // EDGE * WIDTH
            largest = max(largest, answer.index)
    assert largest > 2**31
