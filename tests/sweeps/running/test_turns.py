"""Test drivers, sweeps and workers with simulated trials, in situations that are rare with real processes."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits.experiments.session import Progress
from fewbits.experiments.storage import lease
from fewbits.experiments.storage.lease import Holder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running import driver, worker
from fewbits.sweeps.running import run_sweep as run_sweep
from fewbits.sweeps.running.driver import Driver, Ended, Job, Outcome, Stage, job
from tests.sweeps.sweep_inputs import planned, tiny_file

BRANCHES = {
    "arms": {
        "trunk": {"overrides": ["recipe=bf16"]},
        "early": {"overrides": ["recipe=nvfp4"], "parent": "trunk", "at": 4},
        "late": {"overrides": ["recipe=nvfp4"], "parent": "trunk"},
    }
}


class Pretended:
    """A simulated backend: each trial ends one turn of the driver's loop after it starts, with a result.

    An ended trial also has all checkpoints from which branches start.

    befalls: called with the job after the trial has ended, to remove or change its files.
    """

    def __init__(self, befalls: Callable[[Job], None] = lambda job: None) -> None:
        self.started: list[str] = []
        self._befalls = befalls
        self._jobs: list[Job] = []

    def require(self, trials: object) -> None: ...

    def room(self, resources: Resources) -> bool:
        return not self._jobs

    def start(self, job: Job, resources: Resources) -> None:
        self.started.append(job.id)
        self._jobs.append(job)

    def wait(self, seconds: float) -> list[Ended]:
        jobs, self._jobs = self._jobs, []
        for one in jobs:
            finish(one)
            self._befalls(one)
        return [Ended(one.id, Outcome("over", speed=1.0)) for one in jobs]

    def kill(self, trial: str) -> None: ...
    def close(self) -> None: ...


def finish(job: Job) -> None:
    for step in job.runtime.keep_steps:
        (job.folder.kept / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    job.path.mkdir(parents=True, exist_ok=True)
    result = {"id": job.id, "status": "done", "step": job.trial.training.steps}
    (job.path / "result.json").write_text(json.dumps(result))


@pytest.fixture
def plan(cache: Path, tmp_path: Path) -> Plan:
    return planned(tiny_file(tmp_path, cache, BRANCHES, "branches"), f"runtime.runs={tmp_path / 'runs'}")


@pytest.fixture
def family(plan: Plan) -> dict[str, Planned]:
    """Return the trials of BRANCHES, by arm."""
    return {member.cell.arm: plan.trials[member.id] for member in plan.members}


@pytest.fixture(autouse=True)
def _without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "REST", 0.0)


# ------------------------------------------------------------------------------------------------ removed meanwhile


def test_a_parent_that_was_removed_is_trained_once_more_for_its_branches(
    plan: Plan, family: dict[str, Planned]
) -> None:
    removed: list[Path] = []

    def remove_once(job: Job) -> None:
        if not removed:
            removed.append(job.path)
            shutil.rmtree(job.path)

    backend = Pretended(remove_once)
    one = Driver(plan, backend)
    one.run()
    trunk, early, late = (family[arm].id for arm in ("trunk", "early", "late"))
    assert backend.started[:2] == [trunk, trunk]
    assert sorted(backend.started[2:]) == sorted([early, late])
    assert len(one.of(Stage.OVER)) == 3


def test_a_parent_without_checkpoints_runs_again_only_for_branches_that_have_to_run(
    plan: Plan, family: dict[str, Planned]
) -> None:
    trunk, late = family["trunk"], family["late"]
    Driver(plan, Pretended()).run()
    shutil.rmtree(trunk.folder.kept)
    Driver(plan, backend := Pretended()).run()
    assert backend.started == []
    (late.folder.path / "result.json").unlink()
    Driver(plan, backend).run()
    assert backend.started == [trunk.id, late.id]


def test_files_that_are_seen_late_do_not_have_it_trained_twice(
    plan: Plan, family: dict[str, Planned], tmp_path: Path
) -> None:
    """A trial that has ended is not trained again if a network file system shows its files only later."""
    trunk, hidden = family["trunk"], tmp_path / "hidden"
    looks = 0

    def hide(job: Job) -> None:
        if job.id == trunk.id:
            shutil.move(job.path, hidden)

    def show(one: Driver) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            assert one.tasks[trunk.id].stage is Stage.OVER
            assert store.state(trunk.folder) != "done"
        if looks == 2 and hidden.exists():
            backend._befalls = lambda job: None
            shutil.move(hidden, trunk.folder.path)

    backend = Pretended(hide)
    one = Driver(plan, backend, show)
    backend.room = lambda resources: looks != 1  # type: ignore[method-assign]
    one.run()
    assert backend.started.count(trunk.id) == 1
    assert len(one.of(Stage.OVER)) == 3


def test_a_parent_whose_checkpoints_never_come_fails(plan: Plan, family: dict[str, Planned]) -> None:
    """A parent whose checkpoints never appear fails after three attempts; otherwise it would be trained for ever."""
    backend = Pretended(lambda job: shutil.rmtree(job.folder.kept, ignore_errors=True))
    one = Driver(plan, backend)
    one.run()
    assert backend.started == [family["trunk"].id] * 3
    assert [task.planned.id for task in one.of(Stage.FAILED)] == [family["trunk"].id]
    assert len(one.of(Stage.BLOCKED)) == 2
    (task,) = one.of(Stage.FAILED)
    assert task.failure is not None
    assert "steps 4, 8" in task.failure.reason


# ------------------------------------------------------------------------------------------------ stopped


def test_a_stop_file_that_is_written_again_while_the_worker_ends_is_removed(cache: Path, tmp_path: Path) -> None:
    """A driver that is stopping may write a stop file again just after the worker has removed the first one.

    At that moment the worker still holds its lease, so the driver takes it for running. The driver removes the file
    when the worker has ended, because the file would stop the next attempt.
    """

    class Hears(Pretended):
        held = contextlib.ExitStack()
        turns = 0

        def start(self, job: Job, resources: Resources) -> None:
            super().start(job, resources)
            self.held.enter_context(lease.leased(job.path))

        def wait(self, seconds: float) -> list[Ended]:
            (one,) = self._jobs
            self.turns += 1
            if self.turns == 1:
                conductor.stop()
                return []
            if self.turns == 2:
                (one.path / store.STOP).unlink()
                return []
            assert (one.path / store.STOP).exists(), "the driver has written the stop file again"
            self.held.close()
            return [Ended(one.id, Outcome("stopped"))]

    plan = planned(tiny_file(tmp_path, cache, {}), f"runtime.runs={tmp_path / 'runs'}")
    conductor = Driver(plan, Hears())
    conductor.run()
    (task,) = conductor.tasks.values()
    assert task.stage is Stage.WAITING
    assert not (task.planned.folder.path / store.STOP).exists()


# ------------------------------------------------------------------------------------------------ a lost lease


@pytest.mark.parametrize("how", ["taken over", "removed"])
def test_a_worker_that_has_lost_its_lease_writes_nothing_more(
    how: str, family: dict[str, Planned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose machine slept while another worker took over the trial ends at once.

    It is not asked to stop at a checkpoint, since a checkpoint of an earlier step would undo the other worker's work.
    """
    planned = family["trunk"]
    path = planned.folder.path / lease.NAME
    other = vars(Holder("another-host", 1, 1.0, "the next"))
    reported: list[int] = []

    def step(self: object, progress: Progress) -> None:
        reported.append(progress.step)
        if progress.step == 2:
            if how == "removed":
                path.unlink()
            else:
                path.write_text(json.dumps(other))
            time.sleep(1.0)

    monkeypatch.setattr(worker._Reporter, "step", step)
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    checkpoints = list(planned.folder.path.rglob("step-*"))
    outcome = worker.work(job(planned))
    assert (outcome.kind, reported) == ("busy", [1, 2])
    assert list(planned.folder.path.rglob("step-*")) == checkpoints
    assert store.failure(planned.folder) is None
    assert (json.loads(path.read_text()) if how == "taken over" else not path.exists()) in (other, True)
