"""A fixture with the report of a simulated store of MoR at scale smoke, made by a kernel as `fewbits report` does."""

import pytest

from tests.analysis.report.report_inputs import Made, simulated
from tests.experiments.data.data_inputs import shared_cache


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return the report, which tests must not change."""
    folder = tmp_path_factory.mktemp("report")
    simulated("mor", "smoke", folder, shared_cache(tmp_path_factory))
    made = Made(folder / "runs", folder / "reports")
    assert made.report() == 0
    return made
