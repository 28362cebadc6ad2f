"""Compile the kernels that the tests of test_cuda.py need, in parallel on all cores, before these tests run.

    python -m tests.kernels.backends.gpu.warm_parity

To find the kernels, the tests with fixed cases run without comparisons on a backend that only records its launches. Not
included are the kernels of hypothesis's cases, which are drawn anew in each run, and the few kernels of the tests of
streams and graphs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import pytest

from fewbits.kernels.backends.gpu import cuda
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.variants import Variant
from fewbits.kernels.backends.gpu.warm import Recorder, compile_all
from tests.kernels.backends.gpu import device_checks, test_cuda
from tests.kernels.backends.gpu.device_checks import Checks

Case = Callable[[Checks], object]


def kernels(cases: Iterable[Case]) -> list[Variant]:
    """Return the kernels that these test cases would launch, without duplicates; no kernel runs."""
    recorder = Recorder()
    device = Device(recorder)
    with pytest.MonkeyPatch.context() as patch:
        # The results of the recording backend are undefined. It also replaces the reference, because only the shapes of
        # the reference's results matter, as inputs of further calls.
        patch.setattr(device_checks, "reference", device)
        patch.setattr(device_checks, "assert_same", lambda *_: None)
        patch.setattr(device_checks, "unstorable", lambda *_: False)
        for case in cases:
            case(Checks(device, lambda t: t))
    return list(dict.fromkeys(recorder.variants))


def fixed_cases(names: str = "test_") -> Iterator[Case]:
    """Yield the tests whose names begin with `names` and that use the fixture `checks`, once for each parameter set.

    Tests whose cases hypothesis draws are not included.
    """
    for name, test in vars(test_cuda).items():
        if not name.startswith(names) or not inspect.isfunction(test) or hasattr(test, "hypothesis"):
            continue
        if "checks" in inspect.signature(test).parameters:
            marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
            for chosen in product(*(values for _, values in marks)):
                arguments: dict[str, object] = {}
                for (named, _), value in zip(marks, chosen, strict=True):
                    arguments |= {named: value} if isinstance(named, str) else dict(zip(named, value, strict=True))
                yield partial(test, **arguments)


def main() -> int:
    if complaint := cuda.complaint():
        print(f"warm_parity: nothing was compiled: {complaint}", file=sys.stderr)
        return 2
    needed = kernels(fixed_cases())
    print(f"{len(needed)} kernels are needed", flush=True)
    print(f"{compile_all(needed, cuda.architecture_of(0))} kernels are in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
