"""Test MLflow servers: a sweep has the same runs there as in SQLite, and no command prints or stores credentials."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fewbits.commands.ui import LIGHT
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.mirror import Mirror
from tests.experiments.trial_inputs import TINY, ended, started
from tests.ray_head import free_ports
from tests.sweeps.sweep_inputs import ROOT
from tests.sweeps.tracking.tracked import ONE, everything, planned, train

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


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the shared MLflow server. It also has runs of other tests."""
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Plan:
    """Return the plan of two trials that were trained without MLflow."""
    made = planned(tmp_path_factory.mktemp("done"), cache, f"seeds: [0, 1]{ONE}")
    for trial in made.trials.values():
        train(trial)
    return made


def test_the_same_sweep_gives_the_same_runs_as_in_sqlite(shared_server: str, done: Plan, tmp_path: Path) -> None:
    local = Mirror(done, uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert local.sync(last=True)
    expected = everything(local.uri, done.store)
    for _ in range(2):
        assert Mirror(done, uri=shared_server).sync(last=True)
        assert everything(shared_server, done.store) == expected


def test_users_that_send_at_once_lose_nothing(
    shared_server: str, done: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEWBITS_USER", "both")
    mirrors = [Mirror(done, uri=shared_server) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda mirror: mirror.sync(last=True), mirrors))
    local = Mirror(done, uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    local.sync(last=True)
    assert everything(shared_server, done.store) == everything(local.uri, done.store)


def test_a_server_that_was_away_gets_everything_when_it_is_back(
    done: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops after it got one of two trials has both of them after its restart, and no run twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(connection, "SHARE", 0)
    member, _ = done.members
    some = Plan(done.sweeps, (member,), {member.id: done.trials[member.id]})
    with mlflow_server(tmp_path) as address:
        mirror = Mirror(done, uri=address)
        assert Mirror(some, uri=address).sync()
    with pytest.warns(RuntimeWarning, match="MLflow was not updated"):
        assert not mirror.sync(last=True)
    local = Mirror(done, uri=f"sqlite:///{tmp_path / 'other.db'}")
    assert local.sync(last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with mlflow_server(tmp_path, port=int(address.rpartition(":")[2])):
            assert mirror.sync(last=True)
            assert everything(mirror.uri, done.store) == everything(local.uri, done.store)


# ------------------------------------------------------------------------------------------------ credentials

SECRET = "hunter2-Zq"


def uri_of(kind: str, served: str, folder: Path) -> str:
    if kind == "a server":
        return f"http://alice:{SECRET}@{served}"
    if kind == "no server":
        return f"http://alice:{SECRET}@127.0.0.1:{free_ports(1)[0]}/?token={SECRET}"
    if kind == "a database":
        return f"sqlite:///{folder / 'of-user.db'}?token={SECRET}"
    return f"postgresql://alice:{SECRET}@127.0.0.1:1/db"


@pytest.mark.parametrize(
    "kind",
    ["a server", "no server", *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("a database", "no database"))],
)
def test_no_credential_is_printed_or_stored(kind: str, shared_server: str, cache: Path, tmp_path: Path) -> None:
    """The commands train, sweep, report and ui neither print nor store a password in MLFLOW_TRACKING_URI.

    One `train` also gets the URI as an argument, since provenance.json records the arguments. With a working database,
    ui is left out, since it would run until Ctrl-C.
    """
    uri = uri_of(kind, shared_server.removeprefix("http://"), tmp_path)
    runs, printed = tmp_path / "runs", tmp_path / "printed"
    overrides = [f"{key}={value}" for key, value in (TINY | {"training.steps": 2, "runtime.cache": cache}).items()]
    (tmp_path / "one.yaml").write_text("arms: {bf16: {overrides: [recipe=bf16]}}\n")
    one = [str(tmp_path / "one.yaml"), *overrides, "--runs", str(runs)]
    commands = [
        ["train", "recipe=mor/tensor", *overrides, f"runtime.runs={runs}", "runtime.tracking=mlflow", f"+note={uri}"],
        ["train", "recipe=mor/tensor", *overrides, f"runtime.runs={runs}", "runtime.tracking=mlflow"],
        ["sweep", *one, "--backend", "local"],
        ["ui", "--sync-only", "--runs", str(runs)],
        ["report", *one, "--out", str(tmp_path / "reports")],
    ]
    if kind != "a database":
        commands.append(["ui", "--runs", str(runs), "--port", str(free_ports(1)[0])])
    environment = {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "FEWBITS_USER": "alice",
        "PYTHONPATH": str(ROOT / "src"),
    }
    for command in commands:
        process = started(command, printed, environment=environment, leads=True, folder=tmp_path)
        try:
            ended(process, timeout=400)
        finally:
            process.kill()
    output = printed.read_text()
    assert SECRET not in output
    assert "Traceback" not in output
    works = kind in ("a server", "a database")
    assert ("MLflow was not updated" in output) != works
    assert ("trials sent to" in output) == works
    assert "***" in output
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".db"]
    assert {"provenance.json", *([".store.json"] if works else [])} <= {path.name for path in stored}
    for path in stored:
        assert SECRET.encode() not in path.read_bytes(), path
