"""Provide the fixture `compiled`, which runs a test with each implementation of layers that is not the reference."""

from collections.abc import Iterator

import pytest

from fewbits.kernels.backends import build
from fewbits.kernels.backends.choice import replaced_by
from fewbits.kernels.layers.library import is_compiled
from tests.kernels.backends.gpu.emulated import emulated_device


@pytest.fixture(params=["library", "emulated GPU"])
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the CPU's compiled library, or the CUDA kernels on the emulator, while a test runs."""
    if request.param == "library":
        if not is_compiled():
            pytest.skip("the CPU's library is not compiled")
        yield
    else:
        if build.compiler() is None:
            pytest.skip("there is no C++ compiler for the emulator")
        with replaced_by(emulated_device()[0]):
            yield
