"""Test jobs and sweeps on a real Ray cluster with a token: a head without CPUs, and two nodes of different kinds.

All tests share the cluster, since to start it takes longer than most of the tests. A setting of oneDNN limits the
processes of the second node to SSE4.1, so that its results differ in their last bits. The last test kills a node.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from threading import Event, Thread

import pytest

import fewbits.sweeps.cluster.submit as submit_module
from fewbits import cli
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.cluster.submit import run_job
from fewbits.sweeps.planning import store
from fewbits.sweeps.running import on_ray
from tests.messages import names, naming
from tests.ray_head import PATIENCE, Head, client_environment, joining, parent_of, ray_head
from tests.sweeps.cluster.faulty_way import faulty_way
from tests.sweeps.sweep_inputs import attempts, folders, holder_of, planned, running, tiny_file

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

    faulty_way.py simulates the failures. The exit status of a job that a signal killed is 128 + the signal's number.
    """
    with faulty_way(cluster.address) as way:
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


def test_ctrl_c_lets_the_job_come_to_its_end(cluster: Head, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def press_ctrl_c_once_the_job_runs() -> None:
        while not (tmp_path / "runs").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=press_ctrl_c_once_the_job_runs).start()
    assert run_job(["python", "-c", PATIENT, str(tmp_path / "runs")], cluster.address) == 130
    shown = capfd.readouterr()
    assert shown.out.endswith("at a checkpoint\n")
    assert "asked the job to stop" in shown.err


def test_a_cluster_that_stays_out_of_reach_is_given_up_and_the_job_is_not(
    cluster: Head, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with faulty_way(cluster.address) as way:

        def cut_the_way_once_the_job_is_watched() -> None:
            while not way.cut:
                time.sleep(0.05)
            monkeypatch.setattr(submit_module, "PATIENCE", 1.0)
            way.close()

        Thread(target=cut_the_way_once_the_job_is_watched).start()
        assert run_job(["sleep", "600"], way.address) == 1
    assert names(capfd.readouterr().err, "unreachable", "1 s")


def test_an_address_is_not_overruled_by_the_environment(cluster: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(ValueError, match=naming("http://127.0.0.1:9")):
        run_job(["true"], "http://127.0.0.1:9")
    assert "RAY_API_SERVER_ADDRESS" not in os.environ


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


def sweep(head: Head, file: Path, runs: Path, *arguments: str) -> int:
    """Run a sweep on the cluster, with its driver in this process, and return the exit status."""
    with joining(head):
        return cli.main(["sweep", str(file), "--runs", str(runs), "--address", head.gcs, *arguments])


def test_a_trial_that_no_node_can_hold_waits_and_is_named_and_the_others_run(
    head: Head, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_ray, "WAIT", 1.0)
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1, 2], "resources": {"gpus": 4}})
    printed = StringIO()

    def press_ctrl_c_once_the_line_is_there() -> None:
        give_up = time.monotonic() + PATIENCE
        while "no node" not in printed.getvalue() and time.monotonic() < give_up:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=press_ctrl_c_once_the_line_is_there).start()
    with redirect_stderr(printed):
        assert sweep(head, file, tmp_path / "runs") == 130
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
    killed: list[RunFolder] = []
    ended = Event()

    def kill_the_node_of_the_first_trial() -> None:
        while not ended.wait(0.05):
            # Wait until the log has a line of the worker, so that `attempts` counts this attempt.
            for folder in running(plan):
                pid = holder_of(folder)
                if pid and attempts(folder) and store.reached(folder):
                    killed.append(folder)
                    os.kill(parent_of(pid), signal.SIGKILL)  # the raylet: Ray's main process of the node
                    os.kill(pid, signal.SIGKILL)  # since a machine that is lost loses its workers at the same moment
                    return

    killer = Thread(target=kill_the_node_of_the_first_trial)
    killer.start()
    status = cli.main(["sweep", str(file), "--runs", str(runs), "--address", cluster.address])
    ended.set()
    killer.join()
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
