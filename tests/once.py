"""Make slow test data, such as finished trials, once for all worker processes of a test run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits.common.process import locked

NO_LOCKS = "tests need -n 0 there"  # the end of the warning on a file system without locks


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the temporary folder that all worker processes of this test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the shared folder `name`; the first worker that calls this function fills it by `make(folder)`.

    Tests may read or copy the folder, but must not write to it.
    """
    folder = shared_folder(factory) / name
    finished = folder / ".finished"
    with folder.with_suffix(".lock").open("w") as lock, locked(lock, NO_LOCKS):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete folder of a worker in which `make` failed
            folder.mkdir()
            make(folder)
            finished.touch()
    return folder
