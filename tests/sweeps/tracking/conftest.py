"""Run a real `mlflow server` with an SQLite database, for tests; tests that do not stop it share one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fewbits.commands.ui import LIGHT
from fewbits.sweeps.tracking import connection
from tests.ray_head import free_ports

START = 120.0  # seconds that the server may take until it answers


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """Serve the SQLite database in the folder, which is created if it is missing, and yield the server's address.

    port: the port to listen at; None: a free one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'served.db'}"
    connection.connect(folder, uri)  # creates the database if it is missing
    port = port or free_ports(1)[0]
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    arguments += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments],
            env={**os.environ, **LIGHT, "MLFLOW_BACKEND_STORE_URI": uri},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the shared MLflow server. It also has runs of other tests in the same pytest process."""
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address
