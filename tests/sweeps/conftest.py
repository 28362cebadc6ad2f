"""What tests of sweeps share: data made once, and tiny sweeps as files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.data_inputs import shared_cache


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where corpora are made once for all tests."""
    return shared_cache(tmp_path_factory)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
