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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.experiments.tracking import connection
from fewbits.experiments.tracking.owner import owner_of
from fewbits.sweeps.commands.ui import LOG
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


@dataclass(frozen=True)
class Served:
    """A running `fewbits ui --host 0.0.0.0`, whose store has a study with one comparison view."""

    process: subprocess.Popen[str]
    port: int
    runs: Path
    study: str  # the id of the study's experiment in MLflow
    view: comparison.View
    printed: list[str]  # the lines printed at the start
    group: list[int]  # the processes of MLflow's server


SECRET = "hunter2-Zq"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = tmp_path_factory.mktemp("ui")
    uri = f"sqlite:///{runs / connection.DATABASE}?token={SECRET}"
    client = connection.connect(runs, uri)
    study = connection.experiment(client, SWEEP.study, runs, uri)
    owner = owner_of(runs)
    view = comparison.view_of(SWEEP, study, owner)
    client.set_experiment_tag(study, comparison.TAG + view.key, comparison.view_state(SWEEP, ["a", "b"], owner))
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "fewbits.cli", "ui", "--host", "0.0.0.0", "--port", str(port)]
    command += ["--runs", str(runs), "--allowed-hosts", "runs.example.org"]
    environment = os.environ | {"MLFLOW_TRACKING_URI": uri}
    with (
        (runs / "stderr").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as server,
    ):
        try:
            assert server.stdout is not None
            printed = [server.stdout.readline() for _ in range(3)]
            (child,) = map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
            yield Served(server, port, runs, study, view, printed, processes(child))
        finally:
            server.send_signal(signal.SIGINT)


def test_the_page_is_served_with_comparison_views_in_the_form_that_it_understands(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    base, port = f"http://127.0.0.1:{served.port}", served.port
    assert served.printed[0].startswith(base)
    assert served.printed[2].endswith(f": {served.view.link(base)}\n")
    assert cli.main(["ui", "--port", str(port), "--runs", str(served.runs)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    origin = f"http://localhost:{port}"
    answer = get(f"{origin}/ajax-api/2.0/mlflow/experiments/get?experiment_id={served.study}", Origin=origin)
    tags: list[dict[str, Any]] = json.loads(answer)["experiment"]["tags"]
    (state,) = (
        comparison.read_state(tag["value"]) for tag in tags if tag["key"] == f"mlflow.sharedViewState.{served.view.key}"
    )
    assert "mlflow" in get(base).lower()
    newer = {"columnOrder", "columnWidths"}  # fields of later versions, which MLflow 3.10 ignores
    assert set(state) - understood(state) in (set(), newer)


def test_on_all_interfaces_the_page_works_under_allowed_names_alone(served: Served) -> None:
    addresses = [line.split()[0] for line in served.printed[:2]]
    port = served.port
    assert addresses == [f"http://127.0.0.1:{port}", f"http://{socket.gethostname()}:{port}"]
    search = "/ajax-api/2.0/mlflow/experiments/search"
    for address in (*addresses, f"http://runs.example.org:{port}", "http://runs.example.org"):
        host = address.removeprefix("http://")  # the Host header that a browser sends for this address
        answer = post(f"{addresses[0]}{search}", {"max_results": 1}, Host=host, Origin=address)
        assert "experiments" in json.loads(answer), address
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            post(f"{addresses[0]}{search}", {"max_results": 1}, **headers)


def test_no_credential_is_seen_and_ctrl_c_ends_all_processes(served: Served) -> None:
    """Check that the database's password is not in arguments, which all users can read, nor in outputs or the log."""
    group, process = served.group, served.process
    assert len(group) == 2
    for pid in (process.pid, *group):
        arguments = Path(f"/proc/{pid}/cmdline").read_text()
        assert SECRET not in arguments
        assert "sqlite" not in arguments
    with pytest.raises(urllib.error.HTTPError, match="403"):
        post(f"http://127.0.0.1:{served.port}/", {}, Host="evil.example")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert processes(group[0]) == []
    outputs = [*served.printed, (served.runs / "stderr").read_text(), (served.runs / LOG).read_text()]
    assert "evil.example" in outputs[-1]  # the server logs the refused requests
    assert SECRET not in "".join(outputs)
    (warning,) = (line for line in outputs[3].splitlines() if "no log-in" in line)
    assert all(word in warning for word in ("0.0.0.0", str(served.port), "read", "delete"))


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
