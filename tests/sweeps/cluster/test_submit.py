"""Test a command as a Ray job on a real head with a token, which these tests start.

Its log and exit status come back, connection errors are handled, and Ctrl-C stops it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from threading import Event, Thread

import pytest

import fewbits.sweeps.cluster.report_job as report_job
import fewbits.sweeps.cluster.submit as submit_module
from fewbits import cli
from fewbits.experiments.tracking.owner import user
from fewbits.sweeps.cluster.environment import worker_variables
from fewbits.sweeps.cluster.report_job import fetch, is_study, report_name
from fewbits.sweeps.cluster.submit import job_variables, lasting_store, run_job, submit, token
from tests.messages import names, naming
from tests.ray_head import Head, client_environment, ray_head
from tests.sweeps.running.faulty_way import faulty_way
from tests.sweeps.sweep_inputs import (
    attempts,
    folders,
    holder_of,
    planned,
    running,
    tiny_file,
)

ROOT = Path(__file__).parents[3]
STEPS = 12  # enough steps that the trial still runs when its node is killed


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """Start a head without CPUs for trials, as on a real cluster, and two worker nodes, which join during the tests."""
    with ray_head(cpus=0, workers=2, claiming_cuda=Path(__file__).with_name("claims_cuda")) as started:
        yield started


@pytest.fixture
def cluster(head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    """Return the head, with its token in the variable that Ray reads."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in client_environment(head).items():
        monkeypatch.setenv(name, value)
    return head


# The job's environment


def test_the_shipped_fewbits_runs_on_the_cluster(cluster: Head, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_job(["python", "-m", "fewbits.cli", "doctor"], cluster.address) == 0
    shown = capfd.readouterr()
    (where,) = re.findall(r"^ +fewbits +\S+, (.*)$", shown.out, re.MULTILINE)
    assert "/working_dir_files/" in where
    assert where.endswith("/fewbits")
    assert "Ctrl-C stops it" in shown.err


WORKER = """
import os, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
@ray.remote
def where():
    import fewbits.kernels.formats as formats
    return formats.__file__, os.environ["FEWBITS_BACKEND"], os.environ["MLFLOW_TRACKING_URI"]
print("worker:", *ray.get(where.remote()))
"""


def test_workers_import_what_was_shipped_and_see_our_variables(
    cluster: Head, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEWBITS_BACKEND", "reference")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert run_job(["python", "-c", WORKER], cluster.address) == 0
    (line,) = re.findall(r"^worker: (.*)$", capfd.readouterr().out, re.MULTILINE)
    where, backend, tracking = line.split()
    assert re.search(r"/working_dir_files/.*/fewbits/kernels/formats\.py$", where)
    assert (backend, tracking) == ("reference", "http://mlflow.example:5000")


# Errors on the cluster


def test_a_status_comes_back_and_each_line_once_though_the_way_is_faulty(
    cluster: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first submit gets HTTP 500 although the job has started, and the first connections for the log are cut."""
    script = "import sys, time\nfor i in range(60): print('line', i); time.sleep(0.05)\nsys.exit('last words')"
    with faulty_way(cluster.address) as way:
        assert run_job(["python", "-c", script], way.address) == 1
    assert way.refused == 1
    assert way.cut >= 1
    shown = capfd.readouterr().out
    assert re.findall(r"^line (\d+)$", shown, re.MULTILINE) == [str(i) for i in range(60)]
    assert shown.count("\nlast words\n") == 1
    assert shown.count("Running entrypoint for job") == 1


PATIENT = """
import signal, sys, time
def stop(*_):
    time.sleep(4)  # longer than Ray waits by default
    print("at a checkpoint")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("running", flush=True)
time.sleep(600)
"""


def test_ctrl_c_lets_the_job_come_to_its_end(cluster: Head) -> None:
    imports = "import sys; from fewbits.sweeps.cluster.submit import run_job"
    script = f"{imports}; sys.exit(run_job(sys.argv[2:], {cluster.address!r}))"
    command = [sys.executable, "-c", script, "--", "python", "-c", PATIENT]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        shown = ""
        while "\nrunning\n" not in shown:
            line = client.stdout.readline()
            assert line, client.communicate()
            shown += line
        client.send_signal(signal.SIGINT)
        try:
            out, err = client.communicate(timeout=60)
        finally:
            client.kill()
    assert client.returncode == 130
    assert out.endswith("at a checkpoint\n")
    assert "asked the job to stop" in err
    assert "Traceback" not in err


def test_a_command_that_is_killed_has_the_status_of_its_signal(
    cluster: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert run_job(["python", "-c", killed], cluster.address) == 128 + signal.SIGKILL
    assert "ended by signal 9" in capfd.readouterr().err


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


def test_a_sweep_runs_on_the_worker_nodes_and_outlives_one_of_them(
    cluster: Head, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The head plans trials for CUDA without CUDA and runs none. The second sweep requests more than any node has."""
    runs = tmp_path / "runs"
    file = tiny_file(
        tmp_path, cache, {"seeds": [0, 1], "overrides": [f"training.steps={STEPS}", "runtime.device=cuda"]}
    )
    plan = planned(file, f"runtime.runs={runs}")
    killed: list[int] = []
    ended = Event()
    monkeypatch.setenv("FEWBITS_JOIN_SECONDS", "300")  # long enough for a busy machine

    def kill_the_node_of_the_first_trial() -> None:
        while not ended.wait(0.05):
            for pid in filter(None, (holder_of(folder) for folder in running(plan))):
                killed.append(parent_of(pid))  # the node's raylet
                os.kill(killed[0], signal.SIGKILL)
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
    monkeypatch.setenv("FEWBITS_JOIN_SECONDS", "1")
    greedy = tiny_file(tmp_path, cache, {"resources": {"cpus": 3}}, "greedy")
    assert cli.main(["sweep", str(greedy), "--runs", str(runs), "--address", cluster.address]) == 2
    assert re.search(
        r"fewbits: trial \S+ asks for 1 × \(3 CPUs, 0 GPUs\); the largest of \d nodes has 1 CPUs",
        capfd.readouterr().out,  # the killed node may be back
    )


def parent_of(process: int) -> int:
    """Return the process that started this one: of a worker, its node's raylet."""
    (parent,) = re.findall(r"^PPid:\t(\d+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return int(parent)


# Wrong input is one line, and nothing is sent


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head:8265", ""])
def test_jobs_go_to_a_dashboard(address: str) -> None:
    with pytest.raises(ValueError, match="as in http://head:8265"):
        run_job(["true"], address)


def test_a_dashboard_that_does_not_answer_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=naming("http://127.0.0.1:9")):
        run_job(["true"], "http://127.0.0.1:9")
    assert time.monotonic() - began < 10


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study=mor"], "no store is named"),
        (["study=mor", "runtime.runs=runs"], "the store 'runs' is relative"),
        (["study=mor", "++runtime.runs='./runs'"], r"the store './runs' is relative"),
        (["study=mor", "runtime.runs='~/runs'"], "the store '~/runs' is relative"),
        (["runtime.runs=/mnt/runs", "runtime.runs=runs"], "the store 'runs' is relative"),
    ],
)
def test_a_store_must_outlive_the_job(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        submit(arguments, "http://127.0.0.1:9")
    assert "runtime.runs=/mnt/fewbits/runs" in str(error.value)


@pytest.mark.parametrize("override", ["runtime.runs=/mnt/runs", "++runtime.runs='/mnt/runs'"])
def test_an_absolute_store_is_fine(override: str) -> None:
    assert str(lasting_store(["study=mor", override])) == "/mnt/runs"


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "mlruns", "./mlruns", "file:mlruns"])
def test_tracking_must_mean_the_same_on_the_cluster(uri: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"MLFLOW_TRACKING_URI={uri} is relative")):
        job_variables({"MLFLOW_TRACKING_URI": uri})


@pytest.mark.parametrize(
    "uri", ["http://host:5000", "https://host", "sqlite:////mnt/mlflow.db", "file:///mnt/m", "/mnt/m", "databricks"]
)
def test_the_jobs_variables_are_ours_and_those_of_the_libraries(uri: str) -> None:
    here = {"FEWBITS_BACKEND": "cpu", "HF_HOME": "/mnt/hf", "NCCL_DEBUG": "WARN", "MLFLOW_TRACKING_URI": uri}
    other = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "no", "HF_TOKEN": "no", "MLFLOW_TRACKING_PASSWORD": "no"}
    sent = job_variables(here | other)
    ours = {name: value for name, value in sent.items() if not name.startswith("RAY_JOB_STOP_")}
    assert ours == here | {"FEWBITS_USER": user()}
    sent = job_variables(here | other, ["HF_TOKEN"])
    assert sent["HF_TOKEN"] == "no"
    assert "MLFLOW_TRACKING_PASSWORD" not in sent


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("A_SECRET=hush", "give the name alone"),
        ("NOT_SET_HERE", "NOT_SET_HERE: "),
        ("A B", "the name of an environment"),
    ],
)
def test_a_variable_is_named_and_its_value_is_in_the_environment(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "study=mor", "--env", word]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "hush" not in shown


def test_a_driver_inside_a_job_does_not_repeat_the_jobs_variables() -> None:
    job = {"runtime_env": {"env_vars": {"HF_HOME": "/mnt/hf"}}}
    here = {"HF_HOME": "/mnt/hf", "NCCL_DEBUG": "WARN", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    assert worker_variables(here) == {"NCCL_DEBUG": "WARN"}


def test_the_token_is_looked_for_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token({}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    (tmp_path / "file").write_text("from file\n")
    assert token({}) == "from home"
    assert token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}) == "from file"
    assert token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file"), "RAY_AUTH_TOKEN": "from variable"}) == "from variable"
    assert token({"RAY_AUTH_TOKEN": "from variable", "RAY_AUTH_MODE": "disabled"}) is None
    with pytest.raises(ValueError, match=r"RAY_AUTH_TOKEN_PATH=.*missing: No such file"):
        token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")})


# A study as a job


def test_a_study_is_reported_by_the_job_and_other_sweeps_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run_job(command: list[str], *_: object) -> int:
        commands.append(list(command))
        return 0

    def watch_job(command: list[str], *_: object, **__: object) -> tuple[int, str]:
        commands.append(list(command))
        return 1, ""

    monkeypatch.setattr(submit_module, "run_job", run_job)
    monkeypatch.setattr(report_job, "watch_job", watch_job)
    where = ["--runs", "/mnt/runs", "--address", "http://head:8265"]
    assert cli.main(["sweep", "study=mor", *where, "--parallel", "3"]) == 1
    assert cli.main(["report", "study=mor", *where, "--sweep", "--out", str(tmp_path)]) == 1
    assert cli.main(["sweep", "study=mor", *where, "--dry-run"]) == 0
    assert cli.main(["sweep", "study=mor", "sweep=tables", *where]) == 0
    assert [command[3] for command in commands] == ["report", "report", "sweep", "sweep"]
    reported = ["study=mor", 'runtime.runs="/mnt/runs"', "--sweep", "--address", "auto", "--out", "/mnt/reports"]
    assert [*commands[0][4:]] == [*reported, "--backend", "ray", "--parallel", "3"]
    assert [*commands[1][4:]] == [*reported, "--backend", "ray"]
    assert "--dry-run" in commands[2]
    assert not is_study(["my-sweep.yaml"])


def test_a_report_that_is_seen_from_here_is_copied_in_place_of_the_older_one(tmp_path: Path) -> None:
    made, here = tmp_path / "there" / "reports" / "mor-cpu", tmp_path / "here" / "reports"
    (made / "tables").mkdir(parents=True)
    (made / "index.html").write_text("new")
    log = f"12 reproduced\n{made}/index.html\n"
    assert report_name(log, PurePosixPath(made.parent)) == "mor-cpu"
    assert fetch(made, here) == str(here / "mor-cpu" / "index.html")
    (here / "mor-cpu" / "old").write_text("left by an older report")
    fetch(made, here)
    assert sorted(path.name for path in (here / "mor-cpu").iterdir()) == ["index.html", "tables"]
    assert [path.name for path in here.iterdir()] == ["mor-cpu"]


def test_a_report_that_is_not_seen_from_here_is_said_to_lie_on_the_cluster(tmp_path: Path) -> None:
    assert fetch(Path("/nowhere/reports/mor-cpu"), tmp_path) == (
        "the report is on the cluster: /nowhere/reports/mor-cpu/index.html"
    )
    assert report_name("no report was made\n", PurePosixPath("/nowhere/reports")) is None


def test_a_folder_that_is_no_report_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, mine = tmp_path / "there" / "mor-cpu", tmp_path / "here" / "mor-cpu" / "thesis.tex"
    for folder in (made, mine.parent):
        folder.mkdir(parents=True)
    (made / "index.html").write_text("new")
    mine.write_text("precious")
    assert fetch(made, tmp_path / "here") == str(made / "index.html")
    assert mine.read_text() == "precious"
    assert "no report" in capsys.readouterr().err
