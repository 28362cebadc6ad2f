"""Fixtures with plans of GaussWS's sweeps with small data and models and three seeds, made once per test session."""

import pytest

from fewbits.sweeps.planning.plan import Plan
from tests.analysis.worlds import planned
from tests.experiments.data.data_inputs import shared_cache


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return _planned(tmp_path_factory, "scale=cpu")


@pytest.fixture(scope="session")
def varied_widths(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return the plan of the sweep `widths`, which only scale cpu-full runs."""
    return _planned(tmp_path_factory, "scale=cpu-full", "sweep=widths")


def _planned(tmp_path_factory: pytest.TempPathFactory, *words: str) -> Plan:
    folders = tmp_path_factory.mktemp("gaussws"), shared_cache(tmp_path_factory)
    return planned("gaussws", *folders, *words, "seeds=[0,1,2]", "model.layers=2")
