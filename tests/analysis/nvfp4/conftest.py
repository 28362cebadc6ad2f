"""A fixture with the NVFP4 study's plan at scale cpu, with three seeds and small data, made once per test session."""

import pytest

from fewbits.sweeps.planning.plan import Plan
from tests.analysis.worlds import planned
from tests.experiments.data.data_inputs import shared_cache


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(
        "nvfp4", tmp_path_factory.mktemp("nvfp4"), shared_cache(tmp_path_factory), "scale=cpu", "seeds=[0,1,2]"
    )
