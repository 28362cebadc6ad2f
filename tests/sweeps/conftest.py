"""Provide the fixtures of the tests of sweeps: data that are prepared once, and a finished tiny sweep."""

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
    """Return the folder in which corpora are prepared once for all tests."""
    return shared_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def forked_from_one() -> None:
    """Fork trials and commands from a process that has imported the modules of both."""
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
    """A sweep of eight trials with branches, and its results without any interruption."""

    file: Path
    store: Path
    left: dict[str, dict[str, bytes]]  # by run folder, the contents of the files that have to be reproducible

    def of(self, plan: Plan) -> dict[str, dict[str, bytes]]:
        """Return what is left of a plan of some of the trials."""
        return {folder.path.name: self.left[folder.path.name] for folder in folders(plan)}


@pytest.fixture(scope="session")
def undisturbed(cache: Path, forked_from_one: None, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:

    def make(folder: Path) -> None:
        file = tiny_file(folder, cache, FAMILY, "family")
        assert cli.main(["sweep", str(file), "--runs", str(folder / "runs"), "--backend", "local"]) == 0

    folder = once(tmp_path_factory, "undisturbed", make)
    file, store = folder / "family.yaml", folder / "runs"
    return Undisturbed(file, store, all_left(planned(file, f"runtime.runs={store}")))
