"""Check on the emulator kernels that are compiled with the constants of their variant, as NVRTC compiles them.

In other tests the emulator's kernels read these constants at run time, so code that the compiler evaluates from
constants is not tested. A few classes of kernels are compiled, and more with FEWBITS_TESTS=deep. Such a deep run also
checks all classes, whose kernels then read the constants at run time, for undefined behaviour.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch import Tensor

from fewbits.kernels.backends import build
from fewbits.kernels.backends.gpu import tiles
from fewbits.kernels.backends.gpu.device import Device
from tests.kernels.backends.gpu.emulated import ConstantLauncher, emulated_device
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES
from tests.kernels.inputs import assert_same, make

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")
SHORT = ("128x128, gam, with statistics", "channel down, many rows")
DEEP = (
    *("1x16, statistics of blocks", "1x1, amax, fp16", "nvfp4, stochastic, ragged rht16", "nvfp4 16x16, both axes"),
    *("fouroversix, stochastic, rht16", "eden, rht128 down", "gam by row", "channel", "odd partition, parts left out"),
    *("channel down, many rows, stochastic, with statistics", "channel down, many rows, gam"),
    *("encode, e3m2, 1x32, mx", "decode, nvfp4 down, fp32", "decide", "sampled weight, uniform"),
)


def tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from tensors(part)


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)])
def test_constants_give_the_bits_of_run_time_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FEWEST_STRIPS", 1)
    ask, dtype, shape = CLASSES[name]
    if shape[0] > 2048:
        shape = (shape[0], 40)
    launcher = ConstantLauncher()
    x = make("lognormal", shape, dtype)
    ours, theirs = (list(tensors(ask(device, x))) for device in (Device(launcher), emulated_device()[0]))
    assert launcher.launches
    assert len(ours) == len(theirs) > 0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(a, b, f"result {i} of {name}")


SANITIZED = """
from fewbits.kernels.backends.gpu import tiles
from tests.kernels.backends.gpu.emulated import emulated_device
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES
from tests.kernels.inputs import make
tiles.FEWEST_STRIPS = 1
device, _ = emulated_device("-fsanitize=undefined", "-fno-sanitize-recover=all", "-g1")
for kind in ("lognormal", "one bad"):
    for name, (ask, dtype, shape) in CLASSES.items():
        size = (2060, 20) if shape[0] > 2048 else (min(shape[0], 272), min(shape[1], 272))
        ask(device, make(kind, size, dtype))
print("classes:", len(CLASSES))
"""


@pytest.mark.deep
def test_no_class_has_undefined_behaviour() -> None:
    """Run all classes of kernels in a separate process, in a build that aborts at the first undefined operation."""
    done = subprocess.run([sys.executable, "-c", SANITIZED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"classes: {len(CLASSES)}" in done.stdout
