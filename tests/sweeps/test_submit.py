"""A command on a cluster, as a Ray job: its log and status come back, faults on the way are borne, Ctrl-C stops it.

Against a real head, with a token, started by these tests.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

import fewbits.sweeps.submit as submit_module
from fewbits.sweeps.submit import require_lasting_store, run_job, submit, token, travelling
from tests.ray_head import Head, client_environment, ray_head
from tests.sweeps.faulty_way import faulty_way

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as started:
        yield started


@pytest.fixture
def cluster(head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    """The head, with its token where Ray looks for one."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in client_environment(head).items():
        monkeypatch.setenv(name, value)
    return head


# What runs there


def test_the_shipped_fewbits_runs_on_the_cluster(cluster: Head, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_job(["python", "-m", "fewbits.cli", "doctor"], cluster.address) == 0
    shown = capfd.readouterr()
    (where,) = re.findall(r"^  fewbits +\S+, (.*)$", shown.out, re.MULTILINE)
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


# What may go wrong there


def test_a_status_comes_back_and_each_line_once_though_the_way_is_faulty(
    cluster: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first submit gets HTTP 500 though the job has started; the first connections for the log are cut."""
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
    time.sleep(4)  # longer than Ray waits unless told otherwise
    print("at a checkpoint")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("running", flush=True)
time.sleep(600)
"""


def test_ctrl_c_lets_the_job_come_to_its_end(cluster: Head) -> None:
    script = (
        f"import sys; from fewbits.sweeps.submit import run_job; sys.exit(run_job(sys.argv[2:], {cluster.address!r}))"
    )
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
    assert "out of reach for 1 s; the job may go on there" in capfd.readouterr().err


# Wrong input is one line, and nothing is sent


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head:8265", ""])
def test_jobs_go_to_a_dashboard(address: str) -> None:
    with pytest.raises(ValueError, match="as in http://head:8265"):
        run_job(["true"], address)


def test_a_dashboard_that_does_not_answer_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:9:"):
        run_job(["true"], "http://127.0.0.1:9")
    assert time.monotonic() - began < 10


def test_an_address_is_not_overruled_by_the_environment(cluster: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(ValueError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:9:"):
        run_job(["true"], "http://127.0.0.1:9")
    assert "RAY_API_SERVER_ADDRESS" not in os.environ


def test_a_missing_and_a_wrong_token_say_where_to_find_the_right_one(
    cluster: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(ValueError, match=r"does not know the token: set RAY_AUTH_TOKEN.*`ray get-auth-token`"):
        run_job(["true"], cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="wants a token: set RAY_AUTH_TOKEN"):
        run_job(["true"], cluster.address)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["study=mor"], "no store is named"),
        (["study=mor", "runtime.runs=runs"], "the store 'runs' is relative"),
        (["study=mor", "++runtime.runs='./runs'"], r"the store './runs' is relative"),
        (["study=mor", "--runs", "~/runs"], "the store '~/runs' is relative"),
        (["runtime.runs=/mnt/runs", "runtime.runs=runs"], "the store 'runs' is relative"),
    ],
)
def test_a_store_must_outlive_the_job(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        submit(words, "http://127.0.0.1:9")
    assert "runtime.runs=/mnt/fewbits/runs" in str(error.value)


@pytest.mark.parametrize("words", [["runtime.runs=/mnt/runs"], ["--runs", "/mnt/runs"], ["--runs=/mnt/runs"]])
def test_an_absolute_store_is_fine(words: list[str]) -> None:
    require_lasting_store(["study=mor", *words])


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "mlruns", "./mlruns", "file:mlruns"])
def test_tracking_must_mean_the_same_on_the_cluster(uri: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"MLFLOW_TRACKING_URI={uri} is relative")):
        travelling({"MLFLOW_TRACKING_URI": uri})


@pytest.mark.parametrize(
    "uri", ["http://host:5000", "https://host", "sqlite:////mnt/mlflow.db", "file:///mnt/m", "/mnt/m", "databricks"]
)
def test_ours_travel_and_nothing_else(uri: str) -> None:
    sent = travelling({"MLFLOW_TRACKING_URI": uri, "FEWBITS_BACKEND": "cpu", "HOME": "/root", "AWS_SECRET": "no"})
    assert {name for name in sent if not name.startswith("RAY_JOB_STOP_")} == {"MLFLOW_TRACKING_URI", "FEWBITS_BACKEND"}
    assert sent["MLFLOW_TRACKING_URI"] == uri


def test_the_token_is_looked_for_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token({}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    (tmp_path / "file").write_text("from file\n")
    assert token({}) == "from home"
    assert token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}) == "from file"
    assert token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file"), "RAY_AUTH_TOKEN": "said"}) == "said"
    assert token({"RAY_AUTH_TOKEN": "said", "RAY_AUTH_MODE": "disabled"}) is None
    with pytest.raises(ValueError, match=r"RAY_AUTH_TOKEN_PATH=.*missing: No such file"):
        token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")})
