"""Check under ThreadSanitizer that the CUDA kernels have no races, and that a missing barrier would be reported."""

import pytest

from tests.kernels.backends.gpu import races
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES

# Tiles with statistics, strips, and rotations between warps.
THREE = (
    "128x128, gam, with statistics",
    "channel down, many rows, stochastic, with statistics",
    "nvfp4, stochastic, rht128 down",
)


@pytest.fixture(scope="module", autouse=True)
def _sanitizer() -> None:
    if reason := races.unavailable():
        pytest.skip(reason)


@pytest.mark.parametrize(
    "names", [THREE, *(pytest.param(tuple(CLASSES)[i::4], marks=pytest.mark.deep) for i in range(4))]
)
def test_kernels_have_no_races(names: tuple[str, ...]) -> None:
    outcome = races.run(names)
    assert not outcome.race, outcome.output
    assert list(outcome.reached) == list(names)


@pytest.fixture(scope="module")
def reached() -> dict[str, list[str]]:
    return races.run(CLASSES).reached


@pytest.mark.deep
def test_a_barrier_that_is_missing_is_a_race() -> None:
    assert races.run(THREE[2:], without=next(name for name in races.barriers() if name.startswith("rotate.cuh"))).race


@pytest.mark.deep
@pytest.mark.parametrize("barrier", list(races.barriers()))
def test_every_barrier_is_needed(barrier: str, reached: dict[str, list[str]]) -> None:
    classes = [name for name, names in reached.items() if barrier in names]
    assert classes, "no class reaches this barrier"
    assert races.run(classes, without=barrier).race
