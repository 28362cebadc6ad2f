"""Provide one MLflow server for the tests that need one and do not stop it."""

from collections.abc import Iterator

import pytest

from tests.sweeps.tracking.mlflow_servers import mlflow_server


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server that also has the runs of other tests; one process runs all files that use it."""
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address
