"""A sweep's progress: lines that change on a terminal, else a line when something has."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from fewbits.sweeps import store
from fewbits.sweeps.cost import work_of
from fewbits.sweeps.driver import Driver, Stage, Task
from fewbits.sweeps.store import State

QUIET = 60.0  # seconds after which a line is said although nothing has ended


class Display:
    """Called every turn of the driver."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._began: tuple[float, float] | None = None
        self._lines = 0
        self._said: tuple[object, float] = (None, 0.0)
        self._told: set[str] = set()
        self._stopping = False

    def __call__(self, driver: Driver) -> None:
        for task in driver.tasks.values():
            if task.failure is not None and task.stage is Stage.WAITING and task.planned.id not in self._told:
                self._told.add(task.planned.id)
                self.say(f"{task.planned.folder.path.name}: {task.failure.reason}; it is tried again")
        if driver.stopping and not self._stopping:
            self._stopping = True
            self.say("fewbits: stopping: trials end at a checkpoint (once more: at once)")
        counts, running = self._looked_at(driver)
        line = self._line(driver, counts, running)
        if self._live:
            self._redraw([line, *map(_of_one, running)])
        elif self._said[0] != counts or time.monotonic() - self._said[1] > QUIET:
            self._said = counts, time.monotonic()
            print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        self.end()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave what is on the screen, and go on below."""
        if self._lines:
            print(file=self._stream, flush=True)
        self._lines = 0

    def _looked_at(self, driver: Driver) -> tuple[tuple[tuple[str, int], ...], list[Task]]:
        running = [t for t in driver.of(Stage.STARTED) if store.holder(t.planned.folder)]
        elsewhere = [t for t in driver.of(Stage.WAITING) if store.holder(t.planned.folder)]
        over = driver.of(Stage.OVER)
        diverged = sum(store.state(task.planned.folder) is State.DIVERGED for task in over)
        failed = len(driver.of(Stage.FAILED, Stage.BLOCKED))
        counts = {
            "done": len(over) - diverged,
            "running": len(running),
            "running elsewhere": len(elsewhere),
            "failed": failed,
            "diverged": diverged,
            "waiting": len(driver.tasks) - len(over) - failed - len(running) - len(elsewhere),
        }
        return tuple((name, count) for name, count in counts.items() if count or name == "done"), running + elsewhere

    def _line(self, driver: Driver, counts: tuple[tuple[str, int], ...], running: list[Task]) -> str:
        text = f"{len(driver.tasks)} trials: " + ", ".join(f"{count} {name}" for name, count in counts)
        reports = [(task, store.progress(task.planned.folder) or {}) for task in running]
        if speed := sum(report.get("tokens_per_second", 0.0) for _, report in reports):
            text += f"  {speed:,.0f} tokens/s"
        parts = {task.planned.id: report["step"] / report["steps"] for task, report in reports if "step" in report}
        done = left = 0.0
        for task in driver.tasks.values():
            amount = work_of(task.planned.trial)
            part = 1.0 if task.ended else parts.get(task.planned.id, 0.0)
            done, left = done + part * amount, left + (1 - part) * amount
        now = time.monotonic()
        if self._began is None and running:
            self._began = now, done
        if self._began is not None and done > self._began[1] and now - self._began[0] > 1:
            text += f"  {clock(left * (now - self._began[0]) / (done - self._began[1]))} left"
        return text + ("  stopping at checkpoints" if driver.stopping else "")

    def _redraw(self, lines: list[str]) -> None:
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in lines[: size.lines - 2]]
        up = f"\033[{self._lines - 1}A" if self._lines > 1 else ""
        self._stream.write(f"\r{up}\033[J" + "\n".join(lines))
        self._stream.flush()
        self._lines = len(lines)


def _of_one(task: Task) -> str:
    report = store.progress(task.planned.folder)
    name = task.planned.folder.path.name
    if report is None:
        return f"  {name}"
    return f"  {name}  step {report['step']}/{report['steps']}  loss {report['loss']:.4f}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} days {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
