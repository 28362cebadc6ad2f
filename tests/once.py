"""Make what is slow to make once for all workers of a run: finished trials, which tests read or copy."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits.common.locks import locked

NO_LOCKS = "tests run with -n 0 there"


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of this run see."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that the first worker to ask has filled by `make`; nobody may write to it afterwards."""
    folder = shared_folder(factory) / name
    finished = folder / ".finished"
    with folder.with_suffix(".lock").open("w") as lock, locked(lock, NO_LOCKS):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed
            folder.mkdir()
            make(folder)
            finished.touch()
    return folder
