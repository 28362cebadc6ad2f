"""A plan of GaussWS's sweeps with small data, once for all tests of the room."""

from collections.abc import Iterator

import pytest
import torch

from fewbits.sweeps.plan import Plan, plan
from fewbits.sweeps.sweep import load_sweeps
from tests.experiments.data_inputs import shared_cache

SMALL = ("model.layers=2", "data=synthetic", "data.size=65536", "evaluation.windows=2", "runtime.device=cpu")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small, and other processes compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """At cpu scale, of three seeds."""
    folder, cache = tmp_path_factory.mktemp("gaussws"), shared_cache(tmp_path_factory)
    where = (f"runtime.runs={folder / 'runs'}", f"runtime.cache={cache}")
    return plan(*load_sweeps(("study=gaussws", "scale=cpu", "seeds=[0,1,2]", *SMALL, *where)))
