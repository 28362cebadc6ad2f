"""Provide one MLflow server that tests share, for tests that do not need to stop it."""

from collections.abc import Iterator

import pytest

from tests.sweeps.tracking.mlflow_servers import mlflow_server


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the shared MLflow server. It also has runs of other tests in the same pytest process."""
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address
