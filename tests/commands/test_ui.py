"""Test `fewbits ui`: it serves MLflow's page, and Ctrl-C ends all its processes."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.commands import ui
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.mirror import experiments
from tests.ray_head import free_ports

SECRET = "hunter2-Zq"
SEARCH = "/ajax-api/2.0/mlflow/experiments/search"


def post(url: str, body: dict[str, Any], **headers: str) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def processes(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def test_the_page_is_served_by_two_processes_without_showing_a_credential(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the page works under this machine's local names alone.

    No credential is in the arguments of a process, which all users can read, nor in the output or the log.
    """
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?token={SECRET}"
    (port,) = free_ports(1)
    options = ["ui", "--port", str(port), "--runs", str(tmp_path)]
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "fewbits.cli", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"MLFLOW_TRACKING_URI": uri},
        ) as server,
    ):
        try:
            assert server.stdout is not None
            base = f"http://127.0.0.1:{port}"
            printed = server.stdout.readline()
            assert printed.startswith(f"{base}/#/experiments?workflowType=")
            assert cli.main(options) == 2  # the port is in use
            assert len(capsys.readouterr().err.splitlines()) == 1
            for name in ("127.0.0.1", "localhost"):
                answer = post(
                    f"{base}{SEARCH}", {"max_results": 1}, Host=f"{name}:{port}", Origin=f"http://{name}:{port}"
                )
                assert "experiments" in json.loads(answer), name
            for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    post(f"{base}{SEARCH}", {"max_results": 1}, **headers)
            (child,) = map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
            of_all = [server.pid, *processes(child)]
            assert len(of_all) == 3
            for pid in of_all:
                arguments = Path(f"/proc/{pid}/cmdline").read_text()
                assert SECRET not in arguments
                assert "sqlite" not in arguments
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    assert processes(child) == []
    outputs = [printed, (tmp_path / "stderr").read_text(), (tmp_path / ui.LOG).read_text()]
    assert "evil.example" in outputs[-1]  # the server logs the refused requests
    assert SECRET not in "".join(outputs)


def test_a_server_elsewhere_is_not_served_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://alice:{SECRET}@127.0.0.1:9")
    with pytest.raises(ValueError, match=r"\*\*\*.* is a server: .*--sync-only"):
        ui.main(["--runs", str(tmp_path)])


def test_the_pages_of_a_store_are_those_of_its_own_experiments(tmp_path: Path) -> None:
    """Check that the experiment with the newest run comes first, and that those of other stores are not named."""
    uri, mine, other = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "mine", tmp_path / "other"
    client = connection.connect(mine, uri)
    other.mkdir()
    made = {}
    for name, store, start in (("mor", mine, 2000), ("fewbits", mine, 1000), ("theirs", other, 3000)):
        made[name] = connection.experiment(client, name, store, uri)
        client.create_run(made[name], start, connection.owner_of(store))
    assert list(experiments(mine, uri).items()) == [("mor", made["mor"]), ("fewbits", made["fewbits"])]
