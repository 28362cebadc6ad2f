"""Test that a sweep pauses before the disk is full, and continues when there is room again.

It starts no trial whose checkpoints do not fit, and stops running trials while their checkpoints still fit.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fewbits.experiments.storage.lease import leased
from fewbits.sweeps.live.disk_space import MARGIN, RESERVE, DiskSpace, bytes_below
from fewbits.sweeps.planning.cost import checkpoint_bytes, disk
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running import store
from fewbits.sweeps.running.backend import Ended
from fewbits.sweeps.running.driver import Driver, Stage
from fewbits.sweeps.running.worker import Job, Outcome
from tests.messages import names
from tests.sweeps.running.test_turns import Pretended
from tests.sweeps.sweep_inputs import planned, tiny_file


@pytest.fixture
def two(cache: Path, tmp_path: Path) -> Plan:
    return planned(tiny_file(tmp_path, cache, {"seeds": [0, 1]}), f"runtime.runs={tmp_path / 'runs'}")


def need(plan: Plan) -> int:
    """Return the free bytes that are needed to start one trial: its checkpoints, one more checkpoint, and MARGIN."""
    first = next(iter(plan.trials.values()))
    return disk([first]) + checkpoint_bytes(first.trial) + MARGIN


def test_the_estimate_is_what_a_finished_trial_has_written(undisturbed: object) -> None:
    plan = planned(undisturbed.file, f"runtime.runs={undisturbed.store}")  # type: ignore[attr-defined]
    written = sum(bytes_below(one.folder.checkpoints) + bytes_below(one.folder.kept) for one in plan.trials.values())
    assert 0.8 < disk(plan.trials.values()) / written < 1.2


@pytest.mark.parametrize(("free", "at_once"), [(1.0, 1), (2.0, 2)])
def test_trials_start_only_if_there_is_room_for_all_checkpoints(two: Plan, free: float, at_once: int) -> None:
    class Waits(Pretended):
        most = 0

        def room(self, resources: Resources, like: str | None = None) -> bool:
            return True

        def wait(self, seconds: float) -> list[Ended]:
            self.most = max(self.most, len(self._jobs))
            return super().wait(seconds)

    lines: list[str] = []
    backend = Waits()
    driver = Driver(two, backend, space=DiskSpace(two_store(two), lines.append, lambda _: int(free * need(two))))
    driver.run()
    assert len(driver.of(Stage.OVER)) == 2
    assert backend.most == at_once
    assert bool(lines) == (at_once == 1)


def two_store(plan: Plan) -> Path:
    return plan.store


def test_a_sweep_that_has_no_room_says_so_once_and_continues_when_there_is(two: Plan) -> None:
    free, lines = [need(two) - 1] * 5 + [10 * need(two)] * 50, list[str]()
    driver = Driver(two, Pretended(), space=DiskSpace(two.store, lines.append, lambda _: free.pop(0)))
    driver.run()
    assert len(driver.of(Stage.OVER)) == 2
    paused, again = lines
    assert names(paused, "paused", str(two.store), "fewbits prune")
    assert names(again, "continues")


def test_running_trials_stop_at_a_checkpoint_before_the_disk_is_full_and_resume(two: Plan) -> None:
    """If another program fills the disk, a running trial stops at a checkpoint, and resumes when there is room."""
    first = next(iter(two.trials.values()))
    full = RESERVE + checkpoint_bytes(first.trial) - 1
    lines: list[str] = []

    class Stops(Pretended):
        held = contextlib.ExitStack()
        asked = 0

        def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
            super().start(job, resources, like)
            self.held.enter_context(leased(job.path))

        def wait(self, seconds: float) -> list[Ended]:
            if len(self.started) > 1 or not self._jobs:
                self.held.close()
                return super().wait(seconds)
            (job,) = self._jobs
            if not (job.path / store.STOP).exists():
                return []
            self.asked += 1
            self.held.close()
            self._jobs = []
            return [Ended(job.id, Outcome("stopped"))]

    backend = Stops()
    space: Callable[[Path], int] = lambda _: full if backend.started and not backend.asked else 10 * need(two)  # noqa: E731
    driver = Driver(two, backend, space=DiskSpace(two.store, lines.append, space))
    driver.run()
    assert backend.asked == 1
    assert backend.started.count(backend.started[0]) == 2
    assert len(driver.of(Stage.OVER)) == 2
    assert not (first.folder.path / store.STOP).exists()
    assert [names(line, "paused") for line in lines] == [True, False]
