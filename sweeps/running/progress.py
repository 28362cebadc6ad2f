"""A sweep's progress: lines that change on a terminal, else a line when something has."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from fewbits.sweeps.planning.cost import Speeds, work_of
from fewbits.sweeps.running import store
from fewbits.sweeps.running.driver import Driver, Stage, Task
from fewbits.sweeps.running.store import Failure, State

QUIET = 60.0  # seconds after which a line is said although nothing has ended
WARM = 10.0  # seconds after which a sweep's own pace says how long it takes


class Display:
    """Called every turn of the driver."""

    def __init__(self, speeds: Speeds, stream: TextIO | None = None) -> None:
        self.began: float | None = None  # when the first trial did
        self._speeds = speeds
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._done_before = 0.0  # work, when the first trial began
        self._reached: dict[str, float] | None = None  # parts of the trials that are gone on with, before this sweep
        self._lines = 0
        self._said: tuple[object, float] = (None, 0.0)
        self._told: dict[str, Failure] = {}
        self._stopping = False

    def __call__(self, driver: Driver) -> None:
        for task in driver.of(Stage.WAITING, Stage.STARTED):
            if task.failure is not None and self._told.get(task.planned.id) is not task.failure:
                self._told[task.planned.id] = task.failure
                self.say(f"{task.planned.folder.path.name}: {task.failure.reason}; it is tried again")
        if driver.stopping and not self._stopping:
            self._stopping = True
            self.say("fewbits: stopping: trials end at a checkpoint (once more: at once)")
        if all(task.ended for task in driver.tasks.values()):
            return  # what there is to say, the summary does
        counts, running = self._looked_at(driver)
        line = [f"{len(driver.tasks)} trials: " + ", ".join(f"{count} {name}" for name, count in counts)]
        line += self._pace(driver, running)
        if self._live:
            self._redraw(line, running)
        elif self._said[0] != counts or time.monotonic() - self._said[1] > QUIET:
            self._said = counts, time.monotonic()
            print("  ".join(line), file=self._stream, flush=True)

    def say(self, text: str) -> None:
        self.end()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Wipe out what is live."""
        if self._lines:
            self._stream.write(_back(self._lines))
            self._stream.flush()
        self._lines = 0

    def _looked_at(self, driver: Driver) -> tuple[tuple[tuple[str, int], ...], list[Task]]:
        running = [t for t in driver.of(Stage.STARTED) if store.holder(t.planned.folder)]
        elsewhere = [t for t in driver.of(Stage.WAITING) if store.holder(t.planned.folder)]
        over, failed, blocked = (driver.of(stage) for stage in (Stage.OVER, Stage.FAILED, Stage.BLOCKED))
        diverged = sum(store.state(task.planned.folder) is State.DIVERGED for task in over)
        counts = {
            "done": len(over) - diverged,
            "running": len(running),
            "running elsewhere": len(elsewhere),
            "failed": len(failed),
            "diverged": diverged,
            "blocked": len(blocked),
        }
        counts["waiting"] = len(driver.tasks) - sum(counts.values())
        return tuple((name, count) for name, count in counts.items() if count or name == "done"), running + elsewhere

    def _pace(self, driver: Driver, running: list[Task]) -> list[str]:
        """Tokens a second, and the time left."""
        begun = {task.planned.id: store.progress(task.planned.folder) for task in driver.of(Stage.STARTED)}
        reports = {key: report for key, report in begun.items() if report is not None}
        if self._reached is None:
            planned = [task.planned for task in driver.tasks.values() if not task.ended]
            self._reached = {one.id: store.reached(one.folder) / one.trial.training.steps for one in planned}
        parts = self._reached | {key: report["step"] / report["steps"] for key, report in reports.items()}
        words = []
        if speed := sum(reports.get(task.planned.id, {}).get("tokens_per_second", 0.0) for task in running):
            words.append(f"{speed:,.0f} tokens/s")
        if (left := self._left(driver, parts, len(running))) is not None:
            words.append(f"{clock(left)} left")
        return [*words, *(["stopping at checkpoints"] if driver.stopping else [])]

    def _left(self, driver: Driver, parts: Mapping[str, float], slots: int) -> float | None:
        """By what was measured here before, until this sweep has a pace of its own."""
        shares = {key: 0.0 if task.ended else 1 - parts.get(key, 0.0) for key, task in driver.tasks.items()}
        amounts = {key: work_of(task.planned.trial) for key, task in driver.tasks.items()}
        left = sum(share * amounts[key] for key, share in shares.items())
        done, now = sum(amounts.values()) - left, time.monotonic()
        if self.began is None and slots:
            self.began, self._done_before = now, done
        if self.began is None or not slots:
            return None
        if now - self.began > WARM and done > self._done_before:
            return left * (now - self.began) / (done - self._done_before)
        seconds = {key: self._speeds.seconds(driver.tasks[key].planned) for key, share in shares.items() if share}
        known = [shares[key] * found for key, found in seconds.items() if found is not None]
        return sum(known) / slots if len(known) == len(seconds) else None

    def _redraw(self, words: list[str], running: list[Task]) -> None:
        size = shutil.get_terminal_size()
        width = size.columns - 1
        line = "  ".join(words)
        head = [line] if len(line) <= width else [words[0], "  " + "  ".join(words[1:])]
        lines = [text[:width] for text in [*head, *(_of_one(task, width) for task in running)]][: size.lines - 2]
        self._stream.write(_back(self._lines) + "\n".join(lines))
        self._stream.flush()
        self._lines = len(lines)


def _back(lines: int) -> str:
    """To the first of the lines that were drawn, with nothing below it."""
    return "\r" + (f"\033[{lines - 1}A" if lines > 1 else "") + "\033[J"


def _of_one(task: Task, width: int) -> str:
    """Where there is little room, its name gives way: its middle."""
    report = store.progress(task.planned.folder)
    name = task.planned.folder.path.name
    said = "" if report is None else f"  step {report['step']}/{report['steps']}  loss {report['loss']:.4f}"
    room = max(20, width - len(said) - 2)
    if len(name) > room:
        name = f"{name[: room - 13]}…{name[-12:]}"
    return f"  {name}{said}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} days {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
