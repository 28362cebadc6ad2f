"""Fixtures for tests of trials. A trial changes torch's global settings, so they are restored after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.data.data_inputs import shared_cache


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of corpora, which all tests share, so that each corpus is made once."""
    return shared_cache(tmp_path_factory)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    import torch

    threads, deterministic, state = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.get_rng_state(),
    )
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(deterministic)
    torch.set_rng_state(state)
