"""Test `fewbits ui`: it serves MLflow's page with the comparison views, and Ctrl-C ends all its processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.commands.ui import LOG
from fewbits.experiments.tracking import connection
from fewbits.experiments.tracking.owner import owner_of
from fewbits.sweeps.planning.expand import expand
from fewbits.sweeps.planning.sweep import Sweep
from fewbits.sweeps.tracking import comparison
from tests.ray_head import free_ports

SWEEP = Sweep(
    "cost", study="mine", overrides=("model=gpt2-tiny",), axes={"a.steps": [1, 2], "b.steps": [3], "c.lr": [0.5]}
)


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return str(answer.read().decode())


def understood(state: dict[str, Any]) -> set[str]:
    """Return the fields of the view `state` that MLflow's page knows, according to lists in the page's scripts.

    Also check that the scripts contain the other names that fewbits writes into views.
    """
    scripts = "".join(file.read_text() for file in Path(str(files("mlflow"))).glob("server/js/build/static/js/*.js"))
    for word in ("mlflow.sharedViewState.", "viewStateShareKey", '"param"', '"average"', '"SHOW_ALL"', '"LINE"'):
        assert word in scripts
    lists = re.findall(r'\["(?:selectedColumns|searchFilter)","[^]]*\]', scripts)
    return {field for found in lists for field in json.loads(found)} & set(state)


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


def test_a_row_is_called_by_its_arm_and_values() -> None:
    first = expand(SWEEP)[0]
    assert comparison.compared(SWEEP, first) == "a.steps=1 b.steps=3 lr=0.5"


def test_the_page_is_served_with_comparison_views_in_the_form_that_it_understands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = connection.tracking_uri(tmp_path)
    client = connection.connect(tmp_path, uri)
    study = connection.experiment(client, SWEEP.study, tmp_path, uri)
    owner = owner_of(tmp_path)
    view = comparison.view_of(SWEEP, study, owner)
    client.set_experiment_tag(study, comparison.TAG + view.key, comparison.view_state(SWEEP, ["a", "b"], owner))
    (port,) = free_ports(1)
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "fewbits.cli", "ui", "--port", str(port), "--runs", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(base)
            assert server.stdout.readline().endswith(f": {view.link(base)}\n")
            assert cli.main(["ui", "--port", str(port), "--runs", str(tmp_path)]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1
            origin = f"http://localhost:{port}"
            answer = get(f"{origin}/ajax-api/2.0/mlflow/experiments/get?experiment_id={study}", Origin=origin)
            tags: list[dict[str, Any]] = json.loads(answer)["experiment"]["tags"]
            (state,) = (
                comparison.read_state(tag["value"])
                for tag in tags
                if tag["key"] == f"mlflow.sharedViewState.{view.key}"
            )
            assert "mlflow" in get(base).lower()
            newer = {"columnOrder", "columnWidths"}  # fields of later versions, which MLflow 3.10 ignores
            assert set(state) - understood(state) in (set(), newer)
            (child,) = map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
            assert len(processes(child)) == 2
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    assert processes(child) == []


SECRET = "hunter2-Zq"


def test_on_all_interfaces_the_page_works_by_name_and_no_credential_is_seen(tmp_path: Path) -> None:
    """Check that the page works only under the allowed host names if the host is 0.0.0.0.

    No credential is in the arguments of a process, which all users can read, nor in the output or the log.
    """
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?token={SECRET}"
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "fewbits.cli", "ui", "--host", "0.0.0.0", "--port", str(port)]
    command += ["--runs", str(tmp_path), "--allowed-hosts", "runs.example.org"]
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"MLFLOW_TRACKING_URI": uri}
        ) as server,
    ):
        try:
            assert server.stdout is not None
            printed = [server.stdout.readline() for _ in range(2)]
            addresses = [line.split()[0] for line in printed]
            assert addresses == [f"http://127.0.0.1:{port}", f"http://{socket.gethostname()}:{port}"]
            search = "/ajax-api/2.0/mlflow/experiments/search"
            for address in (*addresses, f"http://runs.example.org:{port}", "http://runs.example.org"):
                host = address.removeprefix("http://")  # the Host header that a browser sends for this address
                answer = post(f"{addresses[0]}{search}", {"max_results": 1}, Host=host, Origin=address)
                assert "experiments" in json.loads(answer), address
            for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    post(f"{addresses[0]}{search}", {"max_results": 1}, **headers)
            (child,) = map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
            of_all = [server.pid, *processes(child)]
            assert len(of_all) == 3
            for pid in of_all:
                arguments = Path(f"/proc/{pid}/cmdline").read_text()
                assert SECRET not in arguments
                assert "sqlite" not in arguments
        finally:
            server.send_signal(signal.SIGINT)
    outputs = [*printed, (tmp_path / "stderr").read_text(), (tmp_path / LOG).read_text()]
    assert "evil.example" in outputs[-1]  # the server logs the refused requests
    assert SECRET not in "".join(outputs)
    (warning,) = (line for line in outputs[2].splitlines() if "no log-in" in line)
    assert all(word in warning for word in ("0.0.0.0", str(port), "read", "delete"))


def post(url: str, body: dict[str, Any], **headers: str) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def test_a_database_that_mlflow_does_not_open_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If MLflow cannot open the database, for example one made by another version, one line with advice is printed.

    The line has the database, the reason and the command that helps.
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / connection.DATABASE).write_bytes(b"of another kind, and longer than nothing")
    (port,) = free_ports(1)
    assert cli.main(["ui", "--runs", str(tmp_path), "--port", str(port)]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    for value in (f"sqlite:///{tmp_path / connection.DATABASE}", "file is not a database", "`fewbits sync`"):
        assert value in error
