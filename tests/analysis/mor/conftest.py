"""Fixtures with plans of MoR's sweeps with small data, made once per test session."""

from collections.abc import Callable

import pytest

from fewbits.sweeps.planning.plan import Plan
from tests.analysis.mor.worlds import planned
from tests.experiments.data.data_inputs import shared_cache


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Return a function that makes the plan with these overrides; plans are cached, and each has its own store."""
    made: dict[tuple[str, ...], Plan] = {}

    def of(*words: str) -> Plan:
        if words not in made:
            made[words] = planned(tmp_path_factory.mktemp("mor"), shared_cache(tmp_path_factory), *words)
        return made[words]

    return of


@pytest.fixture(scope="session")
def cpu(plans: Callable[..., Plan]) -> Plan:
    return plans("scale=cpu", "seeds=[0,1,2]")
