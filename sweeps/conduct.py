"""A whole sweep from its plan: the backend, the driver, the display and MLflow together, and Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from fewbits.sweeps import store
from fewbits.sweeps.backend import Backend
from fewbits.sweeps.cost import Speeds
from fewbits.sweeps.driver import Driver, Stage, Task, finished
from fewbits.sweeps.mlflow_view import Mirror
from fewbits.sweeps.plan import Plan, Planned
from fewbits.sweeps.plans import save_plan
from fewbits.sweeps.progress import Display
from fewbits.sweeps.store import State

SHOWN = 8  # lines of a failed trial's log
SYNC = 5.0  # seconds between looks for what MLflow does not have
SYNC_WAIT = 60.0  # seconds that a look which is on its way has to end
AGAIN = "the same command goes on"


def conduct(plan: Plan, backend: str = "ray", address: str | None = None, parallel: int | None = None) -> int:
    """Run what is missing; the exit status."""
    try:
        save_plan(plan)
    except OSError as error:
        raise ValueError(f"{error.filename or 'the store'}: {error.strerror}: it cannot be written") from error
    missing = [planned for planned in plan.trials.values() if not finished(planned)]
    driver: Driver | None = None
    display, mirror = Display(), Mirror(plan)
    warnings.showwarning = lambda message, *_: display.say(f"fewbits: {' '.join(str(message).split())}")
    if missing:
        if backend == "local" or not (address or os.environ.get("RAY_ADDRESS")):
            _check_room(missing, backend)
        chosen = make_backend(backend, address, parallel)
        try:
            driver = Driver(plan, chosen, display)
            with _interruptible(driver), _mirrored(mirror):
                driver.run()
        finally:
            chosen.close()
            display.end()
        _remember_speeds(driver)
    status = _summary(plan, driver)
    served = "" if mirror.uri.startswith("http") else "  (served by `fewbits ui`)"
    for name, link in mirror.sync(last=True).links:
        print(f"{name}: {link}{served}")
    return status


@contextmanager
def _mirrored(mirror: Mirror) -> Iterator[None]:
    """MLflow is told what is new every few seconds, beside the driver: it may be slow, or away."""
    ended = threading.Event()

    def mirror_all() -> None:
        while not ended.is_set():
            mirror.sync()
            ended.wait(SYNC)

    thread = threading.Thread(target=mirror_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(SYNC_WAIT)


def _check_room(missing: Sequence[Planned], backend: str) -> None:
    """ValueError for a trial that would wait for ever on this machine."""
    import torch

    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    for planned in missing:
        wanted = planned.resources
        whole = math.ceil(wanted.gpus) if backend == "local" else wanted.gpus  # Ray alone shares a GPU out
        most = max(cores, wanted.ranks) if backend == "local" else cores
        if whole * wanted.ranks > gpus or (wanted.cpus or 0) * wanted.ranks > most:
            raise ValueError(
                f"{planned.folder.path.name} takes {wanted.ranks} × ({wanted.cpus:g} cpus, {wanted.gpus:g} gpus), and "
                f"this machine has {cores} cpus and {gpus} gpus: change resources, or --address a cluster"
            )


def make_backend(name: str, address: str | None, parallel: int | None) -> Backend:
    if name == "local":
        if address:
            raise ValueError("sweep: --address is of a Ray cluster; --backend local is this machine")
        from fewbits.sweeps.local import Local

        return Local(parallel)
    from fewbits.sweeps.on_ray import OnRay

    return OnRay(address, parallel)


@contextmanager
def _interruptible(driver: Driver) -> Iterator[None]:
    """Ctrl-C, or SIGTERM: trials end at their next step, at a checkpoint. Twice: at once.

    Set up when the backend is there: Ray has a handler for SIGTERM of its own.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if driver.stopping:
            raise KeyboardInterrupt
        driver.stop()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remember_speeds(driver: Driver) -> None:
    for task in driver.tasks.values():
        if task.speed is not None:
            Speeds(task.planned.folder.path.parent).measured(task.planned, task.speed)


def _summary(plan: Plan, driver: Driver | None) -> int:
    states = {key: store.state(planned.folder) for key, planned in plan.trials.items()}
    counts = {state: list(states.values()).count(state) for state in State}
    print(f"{len(states)} trials: " + ", ".join(f"{count} {state}" for state, count in counts.items() if count))
    for key, state in states.items():
        if state is State.DIVERGED:
            result = plan.trials[key].folder.result() or {}
            print(f"diverged: {plan.trials[key].folder.path} at step {result.get('step')}")
    failed = driver.of(Stage.FAILED, Stage.BLOCKED) if driver else []
    for task in failed:
        print(_failed(task), file=sys.stderr)
    if driver is not None and driver.stopping:
        print(f"fewbits: stopped; {AGAIN}", file=sys.stderr)
        return 130
    if failed:
        print(f"fewbits: {len(failed)} trials failed; {AGAIN}, from their checkpoints", file=sys.stderr)
    return 1 if failed else 0


def _failed(task: Task) -> str:
    failure = task.failure
    assert failure is not None
    lines = [f"failed: {task.planned.folder.path}: {failure.reason}"]
    if task.stage is Stage.FAILED:
        lines += [f"    {line}" for line in failure.log[-SHOWN:]]
        lines.append(f"    (the whole log: {task.planned.folder.path / store.LOG})")
    return "\n".join(lines)
