"""Run a real PostgreSQL server for tests, if Debian's package and psycopg2 are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_head import free_ports


def _program(name: str) -> str | None:
    """Return the path of a PostgreSQL program, or None; Debian installs the server's programs outside of PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(debian[-1]) if debian else None)


needs_postgres = pytest.mark.skipif(
    _program("initdb") is None or importlib.util.find_spec("psycopg2") is None,
    reason="PostgreSQL or its driver is not installed: apt install postgresql; pip install psycopg2-binary",
)


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Serve a new, empty database in a temporary folder, and yield its URI for MLflow."""
    user = "postgres" if os.geteuid() == 0 else None  # as root, run it as this user: the server refuses to run as root
    (port,) = free_ports(1)
    folder = Path(tempfile.mkdtemp(prefix="fewbits-postgres-", dir="/tmp"))  # in /tmp, which user postgres can read
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

    def run(program: str, *arguments: str) -> None:
        command = [str(_program(program)), "-D", str(folder / "data"), *arguments]
        done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run("initdb", "--auth=trust", "--username=mlflow")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -k {folder}"
        run("pg_ctl", "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
