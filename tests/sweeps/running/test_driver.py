"""Test the driver with real processes: a repeated command finishes a sweep that was killed, stopped or out of memory.

Processes are killed by real signals at random times.
"""

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.running import driver
from fewbits.sweeps.running.driver import PATIENCE as STOPS_WITHIN
from fewbits.sweeps.running.driver import job
from fewbits.sweeps.running.local import Local
from tests.effort import DEEP
from tests.forked_python import run_python
from tests.messages import names
from tests.ray_head import parent_of
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import (
    ROOT,
    SOME,
    all_left,
    attempts,
    folders,
    holder_of,
    kill_workers,
    planned,
    reported_steps,
    running,
    send,
    started,
    steps_done,
    tiny_file,
    trained_twice,
    until,
)

pytestmark = pytest.mark.usefixtures("forked_from_one")

LOCAL = ("--backend", "local")
LONG = ("training.steps=100000", "evaluation.every=100000", "training.checkpoint_every=2")


def sweep(file: Path, runs: Path, *arguments: str) -> int:
    return cli.main(["sweep", str(file), "--runs", str(runs), *LOCAL, *arguments])


def plan_of(file: Path, runs: Path) -> Plan:
    return planned(file, f"runtime.runs={runs}")


def halted_early(plan: Plan) -> dict[int, RunFolder]:
    """Halt (SIGSTOP) workers whose trials still have half of their steps to do; return process id → run folder."""
    halted = {pid: folder for folder in running(plan) if (pid := holder_of(folder)) and send(pid, signal.SIGSTOP)}
    early = {pid: folder for pid, folder in halted.items() if store.reached(folder) <= 4 and folder.result() is None}
    for pid in halted.keys() - early.keys():
        send(pid, signal.SIGCONT)
    return early


def wait_for_worker(folder: RunFolder) -> int:
    """Wait until a worker has trained a step of the trial, and return its process id."""
    return until(lambda: (steps_done(folder) and holder_of(folder)) or 0)


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread while the `with` block runs; at the end of the block, raise the error of `act`."""
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        yield
        acting.result()


# ------------------------------------------------------------------------------------------------ killed


KILLS = 2 if DEEP else 1


def test_workers_their_server_and_the_driver_are_killed_and_the_same_command_finishes(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """If workers, their fork server and the driver are killed, the repeated command finishes the sweep.

    Trials resume from checkpoints, and the results equal those of an uninterrupted sweep bit for bit.
    """
    runs = tmp_path / "runs"
    plan = plan_of(undisturbed.file, runs)
    command = started(tmp_path / "output", "sweep", undisturbed.file, "--runs", runs, *LOCAL, forks=not DEEP)
    kill_workers(command, plan, KILLS)
    workers = command.until(lambda: [pid for folder in running(plan) if (pid := holder_of(folder))])
    server = parent_of(workers[0])
    assert server != command.pid
    os.kill(server, signal.SIGKILL)
    command.until(lambda: not {*workers}.intersection(map(holder_of, running(plan))) and bool(running(plan)))
    time.sleep(random.uniform(0, 1))
    halted = command.until(lambda: halted_early(plan))
    command.kill()
    for pid in halted:
        send(pid, signal.SIGCONT)
    until(lambda: not running(plan))
    # The halted workers have died with the driver and did not finish their trials.
    assert [folder.result() for folder in halted.values()] == [None] * len(halted)
    assert sweep(undisturbed.file, runs) == 0
    assert all_left(plan) == undisturbed.left
    assert [trained_twice(folder) for folder in folders(plan)] == [[]] * 8
    assert sum(map(attempts, folders(plan))) >= 8 + KILLS


def test_a_stopped_sweep_is_at_checkpoints_and_goes_on(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """A sweep that gets SIGINT, as from Ctrl-C, stops at checkpoints; the same command resumes it."""
    runs = tmp_path / "runs"
    plan = planned(undisturbed.file, f"runtime.runs={runs}", *SOME)
    command = started(tmp_path / "output", "sweep", undisturbed.file, "--runs", runs, *LOCAL, *SOME)
    command.until(lambda: any(steps_done(folder) for folder in running(plan)))
    os.killpg(command.pid, signal.SIGINT)
    assert command.end() == 130
    assert names(command.printed, "stopped", "resume")
    assert "Traceback" not in command.printed
    assert not running(plan)
    for folder in folders(plan):
        assert not (folder.path / store.STOP).exists()
        assert store.failure(folder) is None
        if attempts(folder) and folder.result() is None and any(reported_steps(folder)):
            assert store.reached(folder) == reported_steps(folder)[-1][-1]
    assert sweep(undisturbed.file, runs, *SOME) == 0
    assert all_left(plan) == undisturbed.of(plan)


def test_a_sigterm_to_the_process_group_before_the_first_step_fails_no_trial(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The command `timeout` and job schedulers send SIGTERM to all processes of a sweep; workers have to ignore it."""
    runs = tmp_path / "runs"
    plan = planned(undisturbed.file, f"runtime.runs={runs}", *SOME)
    command = started(tmp_path / "output", "sweep", undisturbed.file, "--runs", runs, *LOCAL, *SOME, forks=False)
    worker = command.until(lambda: next(map(holder_of, running(plan)), None))
    assert worker is not None
    assert not any(map(steps_done, folders(plan)))
    for pid in (worker, parent_of(worker), command.pid):  # the driver last, so that it could see a worker die
        os.kill(pid, signal.SIGTERM)
    assert command.end() == 130
    assert not any((folder.path / store.FAILURE).exists() for folder in folders(plan))
    assert "failed" not in command.printed


def test_asked_twice_a_sweep_stops_at_once(undisturbed: Undisturbed, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    plan = planned(undisturbed.file, f"runtime.runs={runs}", *LONG)
    command = started(tmp_path / "output", "sweep", undisturbed.file, "--runs", runs, *LOCAL, *LONG)
    command.until(lambda: bool(running(plan)))
    for folder in running(plan):
        os.kill(holder_of(folder) or 0, signal.SIGSTOP)  # so that the worker writes no checkpoint when it is asked to
    os.kill(command.pid, signal.SIGTERM)
    command.until(lambda: "Ctrl-C again: stop at once" in command.printed)
    os.kill(command.pid, signal.SIGINT)
    assert command.end(STOPS_WITHIN / 2) == 130
    until(lambda: not running(plan))


def test_two_drivers_on_one_store_share_its_trials(undisturbed: Undisturbed, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    plan = planned(undisturbed.file, f"runtime.runs={runs}", *SOME)
    other = started(tmp_path / "output", "sweep", undisturbed.file, "--runs", runs, *LOCAL, *SOME)
    assert sweep(undisturbed.file, runs, *SOME) == 0
    assert other.end() == 0, other.printed
    trained = [[steps for steps in reported_steps(folder) if steps] for folder in folders(plan)]
    assert trained == [[list(range(1, 9))]] * 4
    assert all_left(plan) == undisturbed.of(plan)


# ------------------------------------------------------------------------------------------------ what fails


def spoil(folder: RunFolder) -> None:
    """Make the trial fail when it writes its first checkpoint, by a file in place of the folder `checkpoints`."""
    folder.path.mkdir(parents=True)
    (folder.path / "checkpoints").write_text("no folder")


BAD = {
    "arms": {
        "good": {"overrides": ["optimizer.lr=0.005"]},
        "broken": {},
        "child": {"overrides": ["recipe=nvfp4"], "parent": "broken", "at": 4},
        "grandchild": {"overrides": ["recipe=bf16", "training.steps=2"], "parent": "child"},
        "hot": {"overrides": ["optimizer.lr=1e9"]},
        "after": {"overrides": ["recipe=nvfp4"], "parent": "hot", "at": 8},
    },
    "resources": {"attempts": 2},
}


def test_what_fails_is_named_with_its_log_and_leaves_the_others_whole(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    file = tiny_file(tmp_path, cache, BAD, "bad")
    plan = plan_of(file, runs)
    good, broken, child, grandchild, hot, after = (plan.trials[member.id].folder for member in plan.members)
    spoil(broken)
    assert sweep(file, runs) == 1
    shown = capfd.readouterr()
    assert "6 trials: 1 done, 1 failed, 1 diverged, 3 blocked\n" in shown.out
    assert [store.state(folder) for folder in (good, broken, hot)] == ["done", "failed", "diverged"]
    step = (hot.result() or {})["step"]
    assert f"diverged: {hot.path} at step {step}\n" in shown.out
    errors = shown.err
    (failure,) = [line for line in errors.splitlines() if line.startswith(f"failed: {broken.path}: ")]
    assert "checkpoints" in failure
    assert "    (the whole log: " + str(broken.path / store.LOG) in errors
    assert errors.count(f"{broken.path.name}: ") == 3  # a line for each of two attempts, and one in the summary
    assert attempts(broken) == 2
    blocked = {
        child: f"its parent {broken.path.name} failed",
        grandchild: f"its parent {child.path.name} is blocked",
        after: f"its parent {hot.path.name} diverged before step 8",
    }
    assert cli.main(["status", str(file), "--runs", str(runs), "--json"]) == 0
    rows = {row["folder"]: row for row in json.loads(capfd.readouterr().out)}
    for folder, why in blocked.items():
        assert f"blocked: {folder.path}: {why}\n" in errors
        assert (rows[folder.path.name]["state"], rows[folder.path.name]["note"]) == ("blocked", why)
    last = errors.splitlines()[-1]
    assert last == (
        "fewbits: 1 failed: run the same command again to resume them from their checkpoints; 2 blocked by failed "
        "trials; 1 blocked permanently: their parent diverged before the step at which they start"
    )

    (broken.path / "checkpoints").unlink()
    for _ in range(2):  # the second command has nothing to run
        assert sweep(file, runs) == 1
        shown = capfd.readouterr()
        assert "6 trials: 4 done, 1 diverged, 1 blocked\n" in shown.out
        assert "failed: " not in shown.err
        assert names(shown.err.splitlines()[-1], "1 blocked", "diverged")
    assert len(shown.err.splitlines()) == 2
    assert attempts(good) == 1
    assert store.failure(broken) is None


def test_a_full_disk_ends_the_sweep_with_one_line_and_the_same_command_resumes(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A trial that fails while the disk has no room for a checkpoint is not tried again, and no further one starts."""
    runs = tmp_path / "runs"
    plan = planned(undisturbed.file, f"runtime.runs={runs}", *SOME)
    spoilt = folders(plan)[0]
    spoil(spoilt)
    with monkeypatch.context() as full:
        full.setattr(driver, "free_bytes", lambda path: 1000)
        assert sweep(undisturbed.file, runs, *SOME, "--parallel", "1") == 1
    shown = capfd.readouterr().err
    assert names(shown.splitlines()[-1], "disk", str(runs), "is full", "fewbits prune", "same command")
    assert "failed" not in shown
    assert [attempts(folder) for folder in folders(plan)] == [1, 0, 0, 0]
    (spoilt.path / "checkpoints").unlink()
    assert sweep(undisturbed.file, runs, *SOME) == 0
    assert all_left(plan) == undisturbed.of(plan)


@pytest.mark.parametrize("content", [pytest.param("", marks=pytest.mark.deep), '{"members": 1, "a|b|c": "x"}'])
def test_what_may_be_deleted_may_be_damaged(
    content: str, undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Damaged plans, speeds.json and leases cause no error; they are written again."""
    runs = tmp_path / "runs"
    shutil.copytree(undisturbed.store, runs)
    folder = folders(plan_of(undisturbed.file, runs))[-1]
    (folder.path / "result.json").unlink()
    shutil.rmtree(folder.checkpoints)
    spoilt = [*(runs / "plans").iterdir(), runs / "speeds.json"]
    spoilt += [folder.path / name for name in (store.FAILURE, store.PROGRESS, "lease.json")]
    for path in spoilt:
        path.write_text(content)
    arguments = [str(undisturbed.file), "--runs", str(runs)]
    assert cli.main(["status", *arguments]) == 0
    assert "7 done" in capfd.readouterr().out
    assert sweep(undisturbed.file, runs) == 0
    shown = capfd.readouterr()
    assert "8 trials: 8 done\n" in shown.out
    assert "Traceback" not in shown.err
    assert "MLflow was not updated" not in shown.err
    assert json.loads((runs / "speeds.json").read_text())
    assert cli.main(["status", *arguments]) == 0
    shown = capfd.readouterr()
    assert "8 done" in shown.out
    assert "damaged" not in shown.err  # the plan file was written again


CRASHES = ("SIGSEGV", "SIGKILL", "memory")


def test_crashes_are_told_and_leave_the_others_whole(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    arms: dict[str, Any] = {"good": {}} | {
        how: {"overrides": [*LONG, f"optimizer.lr=0.00{1 + at}"]} for at, how in enumerate(CRASHES)
    }
    file = tiny_file(tmp_path, cache, {"arms": arms, "resources": {"attempts": 1}})
    plan = plan_of(file, runs)
    place = {member.cell.arm: plan.trials[member.id].folder for member in plan.members}

    def crash() -> None:
        for how in CRASHES:  # in the order in which the trials start; two of them run at a time
            worker = wait_for_worker(place[how])
            if how == "memory":
                resource.prlimit(worker, resource.RLIMIT_AS, (1 << 20, 1 << 20))  # it cannot allocate any memory now
            else:
                os.kill(worker, getattr(signal, how))

    with meanwhile(crash):
        assert sweep(file, runs, "--parallel", "2") == 1
    shown = capfd.readouterr()
    assert "4 trials: 1 done, 3 failed" in shown.out
    # No text is expected for lack of memory, which causes different errors.
    expected = {"SIGSEGV": "ended by SIGSEGV", "SIGKILL": "ended by SIGKILL, possibly for lack of memory", "memory": ""}
    for how in CRASHES:
        (failure,) = [line for line in shown.err.splitlines() if line.startswith(f"failed: {place[how].path}: ")]
        assert expected[how] in failure
        assert store.state(place[how]) == "failed"
    assert "Fatal Python error: Segmentation fault" in (place["SIGSEGV"].path / store.LOG).read_text()
    assert place["good"].result() is not None


# ------------------------------------------------------------------------------------------------ branches, caches


def test_what_is_done_is_not_done_again_and_loads_neither_ray_nor_mlflow(undisturbed: Undisturbed) -> None:
    before = [path.stat().st_mtime_ns for path in undisturbed.store.rglob("*")]
    arguments = ["sweep", str(undisturbed.file), "--runs", str(undisturbed.store)]
    modules = "[name for name in ('ray', 'mlflow') if name in sys.modules]"
    script = f"import sys; from fewbits import cli; print(cli.main({arguments!r}), {modules})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = run_python(["-c", script], folder=ROOT, environment=environment)
    first, served, last = done.stdout.splitlines()
    assert (first, last) == ("8 trials: 8 done", "0 []"), done.stderr
    assert served.startswith(f"`fewbits ui --runs {undisturbed.store}`")
    assert [path.stat().st_mtime_ns for path in undisturbed.store.rglob("*")] == before


def test_ranks_of_a_trial_are_processes_that_live_and_die_together(cache: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    overrides = ["training.batch=8", "recipe=nvfp4"]
    file = tiny_file(tmp_path, cache, {"resources": {"ranks": 2}, "overrides": overrides})
    assert sweep(file, runs) == 0
    whole = all_left(plan_of(file, runs))
    (folder,) = folders(plan_of(file, tmp_path / "again"))
    with meanwhile(lambda: os.kill(wait_for_worker(folder), signal.SIGKILL)):
        assert sweep(file, tmp_path / "again") == 0
    assert attempts(folder) == 4
    assert all_left(plan_of(file, tmp_path / "again")) == whole
    assert trained_twice(folder) == []


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("parallel", "cpus", "limit"),
    [(2, 0.01, 2), (3, float(CORES), 1), pytest.param(None, float(CORES), 1, marks=pytest.mark.deep)],
)
def test_trials_run_as_parallel_says_and_the_cores_allow(
    cache: Path, tmp_path: Path, parallel: int | None, cpus: float, limit: int
) -> None:
    """Start trials as long as there is room.

    parallel: the largest number of trials at a time. cpus: the cores that a trial needs. limit: the expected number.
    """
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1, 2], "arms": {"bf16": {"overrides": ["recipe=bf16"]}}})
    trials = [*planned(file, f"runtime.runs={tmp_path / 'runs'}").trials.values()]
    resources = replace(trials[0].resources, cpus=cpus)
    backend, started = Local(parallel), 0
    try:
        for trial in trials:
            if backend.room(resources):
                backend.start(job(trial), resources)
                started += 1
    finally:
        backend.close()
    assert started == limit
