"""Check that warm_parity.py finds the kernels that the tests of test_cuda.py launch."""

import pytest

from fewbits.kernels.backends import build
from tests.kernels.backends.gpu.device_checks import Checks
from tests.kernels.backends.gpu.emulated import emulated_device
from tests.kernels.backends.gpu.test_cuda_emulated import CLASSES
from tests.kernels.backends.gpu.warm_parity import fixed_cases, kernels
from tests.kernels.backends.test_parity import FAMILIES
from tests.kernels.inputs import DTYPES

SHARE = 6  # every sixth case is run
TESTS = ("test_classes", "test_codes", "test_mixtures", "test_extents", "test_sampled")


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")
@pytest.mark.parametrize("name", TESTS)
def test_what_a_case_launches_is_recorded(name: str) -> None:
    cases = list(fixed_cases(name))[::SHARE]
    device, launcher = emulated_device()
    for case in cases:
        case(Checks(device, lambda t: t))
    assert launcher.launches
    assert set(launcher.launches) <= set(kernels(cases))


def test_every_set_of_parameters_is_a_case() -> None:
    assert len(list(fixed_cases("test_families"))) == len(FAMILIES) * len(DTYPES)
    assert len(list(fixed_cases("test_classes"))) == len(CLASSES) * 2
    assert len(list(fixed_cases("test_extents"))) == 1
    assert not list(fixed_cases("test_any_quantizer")), "hypothesis draws its cases"
