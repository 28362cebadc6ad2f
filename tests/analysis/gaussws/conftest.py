"""Fixtures with plans of GaussWS's sweeps with small data and models, made once per test session."""

import pytest

from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.planning.sweep import Sweep
from tests.experiments.data.data_inputs import shared_cache

SMALL = (
    "model.layers=2",
    "data=synthetic",
    "data.size=65536",
    "data.repeat=1000000000",
    "evaluation.windows=2",
    "runtime.device=cpu",
)


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return the study's plan at scale cpu, with three seeds."""
    return plan(*_sweeps(tmp_path_factory, "scale=cpu"))


@pytest.fixture(scope="session")
def varied_widths(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return the plan of the sweep `widths`, which only scale cpu-full runs, with three seeds."""
    sweeps, extra = _sweeps(tmp_path_factory, "scale=cpu-full")
    return plan([one for one in sweeps if one.name == "widths"], extra)


def _sweeps(tmp_path_factory: pytest.TempPathFactory, scale: str) -> tuple[list[Sweep], tuple[str, ...]]:
    folder, cache = tmp_path_factory.mktemp("gaussws"), shared_cache(tmp_path_factory)
    where = (f"runtime.runs={folder / 'runs'}", f"runtime.cache={cache}")
    return load_sweeps(("study=gaussws", scale, "seeds=[0,1,2]", *SMALL, *where))
