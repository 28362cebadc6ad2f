"""Provide fixtures for the tests of sweeps: training data that are prepared once, and a finished tiny sweep."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.sweeps.planning.plan import Plan
from tests.experiments.data.data_inputs import shared_cache
from tests.experiments.trial_inputs import server
from tests.once import once
from tests.sweeps.sweep_inputs import FAMILY, all_left, folders, planned, tiny_file


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder in which training data are prepared once for all tests."""
    return shared_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def forked_from_one() -> None:
    """Fork trials and commands from one process that has already imported their modules, so that they start fast."""
    server()


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    import torch

    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(deterministic)


@dataclass(frozen=True)
class Undisturbed:
    """The sweep FAMILY (eight trials, some of them branches), trained without interruption: the expected results.

    Tests compare interrupted sweeps with it.
    """

    file: Path  # the sweep file
    store: Path
    left: dict[str, dict[str, bytes]]  # name of the run folder → file name → content, for files with reproducible bits

    def of(self, plan: Plan) -> dict[str, dict[str, bytes]]:
        """Return the expected files of the trials of `plan`, in the form of `left`."""
        return {folder.path.name: self.left[folder.path.name] for folder in folders(plan)}


@pytest.fixture(scope="session")
def undisturbed(cache: Path, forked_from_one: None, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:

    def make(folder: Path) -> None:
        file = tiny_file(folder, cache, FAMILY, "family")
        assert cli.main(["sweep", str(file), "--runs", str(folder / "runs"), "--backend", "local"]) == 0

    folder = once(tmp_path_factory, "undisturbed", make)
    file, store = folder / "family.yaml", folder / "runs"
    return Undisturbed(file, store, all_left(planned(file, f"runtime.runs={store}")))
