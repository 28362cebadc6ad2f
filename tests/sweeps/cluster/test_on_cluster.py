"""Test jobs and sweeps on a real Ray cluster with a token: a head without CPUs, and two nodes of different kinds.

All tests share the cluster, since to start it takes longer than most of the tests. A setting of oneDNN limits the
processes of the second node to SSE4.1, so that its results differ in their last bits. The last test kills a node.
"""

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from fewbits import cli
from fewbits.sweeps.cluster.submit import run_job
from fewbits.sweeps.planning import store
from fewbits.sweeps.running import on_ray
from tests.messages import names, naming
from tests.ray_head import Head, client_environment, joining, ray_head
from tests.sweeps.sweep_inputs import attempts, folders, node_killed, planned, tiny_file, until

CLAIMS_CUDA = {"PYTHONPATH": str(Path(__file__).with_name("claims_cuda"))}
OF_OLD = {"ONEDNN_MAX_CPU_ISA": "SSE41"}  # environment variables of the node that simulates an old processor
STEPS = 12  # so many steps that the trial still runs when its node is killed


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """Start the head and two nodes, and yield the head; the nodes may still be joining when the tests begin."""
    with ray_head(nodes=(CLAIMS_CUDA, CLAIMS_CUDA | OF_OLD)) as started:
        yield started


@pytest.fixture
def cluster(head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    """Return the head, and set this process's environment so that Ray's client can connect to it with its token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in client_environment(head).items():
        monkeypatch.setenv(name, value)
    return head


# Jobs

WORKER = """
import os, ray
import fewbits.cli
print("driver:", fewbits.cli.__file__)
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
@ray.remote
def where():
    import fewbits.kernels.formats as formats
    return formats.__file__, os.environ["FEWBITS_BACKEND"], os.environ["MLFLOW_TRACKING_URI"]
print("worker:", *ray.get(where.remote()))
"""


def test_a_job_and_its_workers_import_what_was_shipped_and_workers_see_our_variables(
    cluster: Head, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEWBITS_BACKEND", "reference")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert run_job(["python", "-c", WORKER], cluster.address) == 0
    shown = capfd.readouterr()
    assert "Ctrl-C stops it" in shown.err
    (driver,) = re.findall(r"^driver: (.*)$", shown.out, re.MULTILINE)
    assert re.search(r"/working_dir_files/.*/fewbits/cli\.py$", driver)
    (line,) = re.findall(r"^worker: (.*)$", shown.out, re.MULTILINE)
    where, backend, tracking = line.split()
    assert re.search(r"/working_dir_files/.*/fewbits/kernels/formats\.py$", where)
    assert (backend, tracking) == ("reference", "http://mlflow.example:5000")


CUTS = 2  # the number of connections for the log that are cut
BYTES = 150  # the bytes of a log's answer that pass before the connection is cut: a part of the header


class FaultyWay:
    """A proxy to a Ray dashboard that simulates faults of real connections, which the client has to handle.

    It replaces the answer to the first submit by an HTTP 500, so that the job has started although the client gets an
    error. It cuts the first two connections that carry a log after some bytes. Each connection carries one request.
    """

    def __init__(self, address: str) -> None:
        self._target = (urlsplit(address).hostname, urlsplit(address).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = self.cut = 0
        Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop accepting new connections; open connections stay open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # needed, since `close` alone does not wake a thread in `accept`
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # `accept` raises it when the listener is closed
            while True:
                Thread(target=self._carry, args=(self._listener.accept()[0],), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._target) as server:
            request = client.recv(65536)
            server.sendall(request)
            Thread(target=_pump, args=(client, server), daemon=True).start()
            if request.startswith(b"POST /api/jobs/ ") and not self.refused:
                self.refused += 1
                server.recv(65536)
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nlost")
            elif b"/logs " in request and self.cut < CUTS:
                self.cut += 1
                _pump(server, client, BYTES)
            else:
                _pump(server, client)
            for end in (server, client):
                end.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket, most: int | None = None) -> None:
    with suppress(OSError):
        carried = 0
        while (most is None or carried < most) and (piece := source.recv(65536 if most is None else most - carried)):
            target.sendall(piece)
            carried += len(piece)


KILLED = """
import os, time
for i in range(60):
    print('line', i, flush=True)
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""


def test_each_line_comes_back_once_though_the_way_is_faulty_and_a_killed_command_has_the_status_of_its_signal(
    cluster: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    """If connections to the dashboard fail, the job still runs once, and its log is printed completely and once.

    FaultyWay simulates the failures. The exit status of a job that a signal killed is 128 + the signal's number.
    """
    with closing(FaultyWay(cluster.address)) as way:
        assert run_job(["python", "-c", KILLED], way.address) == 128 + signal.SIGKILL
    assert way.refused == 1
    assert way.cut >= 1
    shown = capfd.readouterr()
    assert re.findall(r"^line (\d+)$", shown.out, re.MULTILINE) == [str(i) for i in range(60)]
    assert shown.out.count("Running entrypoint for job") == 1
    assert "ended by signal 9" in shown.err


PATIENT = """
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(4)  # longer than Ray waits by default
    print("at a checkpoint")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def once(there: Callable[[], object], act: Callable[[], object]) -> None:
    """Call `act` in another thread when the result of `there` is true."""

    def wait() -> None:
        until(there, 0.05)
        act()

    Thread(target=wait).start()


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_lets_the_job_come_to_its_end(cluster: Head, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    once((tmp_path / "runs").exists, press_ctrl_c)
    assert run_job(["python", "-c", PATIENT, str(tmp_path / "runs")], cluster.address) == 130
    shown = capfd.readouterr()
    assert shown.out.endswith("at a checkpoint\n")
    assert "asked the job to stop" in shown.err


def test_a_missing_and_a_wrong_token_say_where_to_find_the_right_one(
    cluster: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(ValueError, match=naming("RAY_AUTH_TOKEN", "ray get-auth-token")):
        run_job(["true"], cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match=naming("RAY_AUTH_TOKEN")):
        run_job(["true"], cluster.address)


# Sweeps


def test_a_trial_that_no_node_can_hold_waits_and_is_named_and_the_others_run(
    head: Head, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_ray, "WAIT", 1.0)
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1, 2], "resources": {"gpus": 4}})
    printed = StringIO()

    once(lambda: "no node" in printed.getvalue(), press_ctrl_c)
    with redirect_stderr(printed), joining(head):
        assert cli.main(["sweep", str(file), "--runs", str(tmp_path / "runs"), "--address", head.gcs]) == 130
    (line,) = [line for line in printed.getvalue().splitlines() if "no node" in line]
    assert names(line, "3 trials wait for 4 GPUs", "no node of the cluster has them")


def test_a_sweep_runs_on_the_worker_nodes_and_outlives_one_of_them(
    cluster: Head, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sweep that is submitted as a job finishes although one of two nodes is killed.

    The trials are for CUDA, which the worker nodes only seem to have (claims_cuda). The nodes are of different kinds: a
    trial that was begun on the lost node starts again on the other one.
    """
    runs = tmp_path / "runs"
    cluster.wait_for_nodes()
    overrides = [f"training.steps={STEPS}", "training.checkpoint_every=1"]
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1], "overrides": [*overrides, "runtime.device=cuda"]})
    plan = planned(file, f"runtime.runs={runs}")
    # Wait until the log has a line of the worker, so that `attempts` counts this attempt.
    with node_killed(plan, lambda trial: bool(attempts(trial) and store.reached(trial))) as killed:
        status = cli.main(["sweep", str(file), "--runs", str(runs), "--address", cluster.address])
    shown = capfd.readouterr()
    assert "MLflow was not updated" not in shown.out
    assert (status, len(killed)) == (0, 1), f"{shown.out}\n{shown.err}"
    assert [folder.over for folder in folders(plan)] == [True, True]
    for folder in folders(plan):
        provenance = folder.provenance() or {}
        assert (provenance["id"], provenance["identity"]["device"]) == (folder.id, "cuda")
    assert cli.main(["status", str(file), "--runs", str(runs)]) == 0
    assert "2 trials: 2 done" in capfd.readouterr().out
    assert sorted(attempts(folder) for folder in folders(plan)) == [1, 2]
    assert all(len(folder.computed()) == 1 for folder in folders(plan))
