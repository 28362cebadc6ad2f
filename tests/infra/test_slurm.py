"""Test the Slurm script with a real Ray and replacements for `srun` and `scontrol`.

The replacements simulate two Slurm nodes on this machine: `srun` runs its command here once, and `scontrol` lists the
nodes and records which jobs are queued again. A replacement for `fewbits` simulates a sweep.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ray_head import PATIENCE, marked_environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra" / "slurm" / "sweep.sbatch"

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    if [[ $1 == --exclude=* ]]; then export SLURM_CPUS_ON_NODE=2; fi # the second node is larger
    shift
done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) tr , '\\n' <<< "$3" ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""
# A replacement for `fewbits`: it waits until two nodes have joined, runs a task, and then waits for SIGINT.
FEWBITS = """#!/usr/bin/env python
import os, sys, time
import ray
print("words:", *sys.argv[1:], flush=True)
ray.init(address=sys.argv[-1], log_to_driver=False, logging_level="ERROR")
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.2)
print("cpus:", int(ray.cluster_resources()["CPU"]), "task:", ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)
try:
    print("training", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("at a checkpoint", flush=True)
    sys.exit(130)
"""
TOO_SLOW = "node timed out during startup"  # Ray gives a node 30 s to start, too few on a very busy machine


@contextmanager
def slurm(tmp_path: Path, **programs: str) -> Iterator[dict[str, str]]:
    """Yield the environment variables of a simulated Slurm job on two nodes.

    programs: name → text of further programs to put first on PATH, beside the replacements for Slurm's commands.
    """
    job = str(os.getpid())  # a number that no other test has, since the head's port and folder follow from it
    with marked_environment() as environment:
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, **programs}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        yield environment | {
            "PATH": f"{tmp_path}:{environment['PATH']}",
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": "node1,node2",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_MEM_PER_NODE": "1000",
            "REQUEUED": str(tmp_path / "requeued"),
        }
    shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)


def test_it_runs_the_sweep_on_all_nodes_and_queues_itself_again_when_time_is_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with slurm(tmp_path, fewbits=FEWBITS) as environment:
        command = ["bash", str(SCRIPT), "study=mor", "runtime.runs=/shared/runs"]
        for _ in range(3):
            with log.open("wb") as out:
                script = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
            if wait_for("\ntraining\n", log, script) or TOO_SLOW not in log.read_text():
                break
            script.terminate()
            script.wait(PATIENCE)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(PATIENCE) == 130, log.read_text()
    text = log.read_text()
    assert " --address 127." not in text
    report = "report study=mor runtime.runs=/shared/runs --sweep --out /shared/reports"
    assert f"words: {report} --address " in text
    assert "cpus: 3 task: 42" in text
    assert "\nat a checkpoint\n" in text
    assert (tmp_path / "requeued").read_text() == f"{os.getpid()}\n"


STILL_RAY = """#!/usr/bin/env python
import socket, sys, time
ports = [int(word.removeprefix("--port=")) for word in sys.argv if word.startswith("--port=")]
listening = [socket.create_server(("", port)) for port in ports]
time.sleep(600)
"""


@pytest.mark.parametrize("status", [0, 2])
def test_the_status_of_the_sweep_is_that_of_the_job_and_ends_it(tmp_path: Path, status: int) -> None:
    with slurm(tmp_path, ray=STILL_RAY, fewbits=f"#!/usr/bin/env bash\nexit {status}\n") as environment:
        done = subprocess.run(["bash", str(SCRIPT)], env=environment, timeout=PATIENCE, check=False)
    assert done.returncode == status
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["my.yaml", "--runs", "/shared/runs"], "sweep my.yaml --runs /shared/runs"),
        (["study=mor", "sweep=tables", "--runs=/shared/runs"], "sweep study=mor sweep=tables --runs=/shared/runs"),
        (["study=mor", "--runs", "/a b/runs"], "report study=mor --runs /a b/runs --sweep --out /a b/reports"),
    ],
)
def test_a_whole_study_gets_its_report_beside_its_runs(tmp_path: Path, words: list[str], command: str) -> None:
    with slurm(tmp_path, ray=STILL_RAY, fewbits='#!/usr/bin/env bash\necho "$@"\n') as environment:
        done = subprocess.run(
            ["bash", str(SCRIPT), *words],
            env=environment,
            timeout=PATIENCE,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    assert f"{command} --address " in done.stdout


def wait_for(line: str, log: Path, script: "subprocess.Popen[bytes]") -> bool:
    """Wait until the log has this line or the script has ended, and return whether the log has it."""
    give_up = time.monotonic() + PATIENCE
    while line not in log.read_text():
        if script.poll() is not None or time.monotonic() > give_up:
            return line in log.read_text()
        time.sleep(0.1)
    return True
