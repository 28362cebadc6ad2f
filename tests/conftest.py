"""Tests marked `gpu` are skipped, with the reason, where there is no CUDA device. Ctrl-C reaches what tests start.

Files go whole to one worker (--dist loadfile), so that what a file's tests share is made once.
"""

import gc
import os
import signal

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("fewbits", deadline=None)
hypothesis.settings.load_profile("fewbits")

# Before torch is imported: threads that spin while they wait take three quarters of the time when workers, and what
# they start, are more than the processors.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# A fifth of a worker's time went to looking for garbage, most of it among what imports have left for good.
gc.set_threshold(20_000, 10, 10)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, in all that they start too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "sweeps" not in item.path.parts)  # the longest files first: no worker ends with them
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
