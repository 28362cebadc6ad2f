"""Check that the emulator, which runs CUDA kernels on the CPU, reveals races and uninitialised shared memory."""

import ctypes

import pytest

from fewbits.kernels.backends import build
from tests.kernels.backends.gpu.emulated import SIMT, compiled

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")
ORDERS = range(8)  # seeds of orders of threads; 0: numeric order


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return compiled(SIMT / "race.cpp")


def passed_on(library: ctypes.CDLL, order: int, *, barrier: bool) -> list[int]:
    read = (ctypes.c_int * 64)()
    library.pass_on(ctypes.c_uint64(order), int(barrier), read)
    return list(read)


def test_a_missing_barrier_shows_once_threads_come_in_another_order(library: ctypes.CDLL) -> None:
    right = list(range(64))
    assert all(passed_on(library, order, barrier=True) == right for order in ORDERS)
    assert passed_on(library, 0, barrier=False) == right, "in order of their numbers it goes unseen"
    assert all(passed_on(library, order, barrier=False) != right for order in ORDERS[1:])


def test_no_block_finds_what_another_left_in_shared_memory(library: ctypes.CDLL) -> None:
    """Check that the emulator fills shared memory with 0xA5 before each block (CTA) runs."""
    for _ in range(2):
        seen = (ctypes.c_int * 5)()
        library.leave(5, seen)
        assert {word & 0xFFFFFFFF for word in seen} == {0xA5A5A5A5}


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (6, 64), (7, 256)])
def test_every_thread_of_every_block_comes_once_whatever_the_order(
    library: ctypes.CDLL, blocks: int, threads: int
) -> None:
    rounds = set()
    for order in ORDERS:
        seen = (ctypes.c_int * (blocks * threads))()
        library.come(ctypes.c_uint64(order), blocks, threads, seen)
        assert sorted(seen) == list(range(blocks * threads))
        rounds.add(tuple(seen))
    assert len(rounds) == len(ORDERS)
    assert tuple(range(blocks * threads)) in rounds
