"""Skip tests marked `gpu`, with the reason, without a CUDA device, and make Ctrl-C reach the processes of tests.

All tests of a file run in one worker (--dist loadfile), so that the fixtures that they share are made once.
"""

import gc
import os
import signal

import hypothesis
import pytest

# How long an example takes depends on the load of the machine.
hypothesis.settings.register_profile("fewbits", deadline=None)
hypothesis.settings.load_profile("fewbits")

# Set before torch is imported: if there are more workers and child processes than processors, threads that spin while
# they wait take three quarters of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# The garbage collector took a fifth of a worker's time, most of it for objects of imported modules, which stay.
gc.set_threshold(20_000, 10, 10)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Restore the handler of SIGINT: a shell ignores it in background jobs, and child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "sweeps" not in item.path.parts)  # the longest files first: they must not be last
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
