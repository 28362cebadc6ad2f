"""Show a sweep's progress: lines that are redrawn on a terminal, otherwise a new line whenever the counts change."""

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

QUIET = 60.0  # seconds after which a line is printed although the counts are the same
WARM = 10.0  # seconds after which the time left follows from the sweep's own pace


class Display:
    """The progress display, which the driver calls every turn."""

    def __init__(self, speeds: Speeds, stream: TextIO | None = None) -> None:
        self.began: float | None = None  # the time when the first trial began
        self._speeds = speeds
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._done_before = 0.0  # the work that was done when the first trial began
        self._reached: dict[str, float] | None = None  # the part of each trial that was done before this sweep
        self._lines = 0
        self._printed: tuple[object, float] = (None, 0.0)  # the counts last printed, and when
        self._failures: dict[str, Failure] = {}  # the last failure printed of each trial
        self._stopping = False

    def __call__(self, driver: Driver) -> None:
        for task in driver.of(Stage.WAITING, Stage.STARTED):
            if task.failure is not None and self._failures.get(task.planned.id) is not task.failure:
                self._failures[task.planned.id] = task.failure
                self.print_line(f"{task.planned.folder.path.name}: {task.failure.reason}; trying again")
        if driver.stopping and not self._stopping:
            self._stopping = True
            self.print_line("fewbits: stopping: trials end at a checkpoint (Ctrl-C again: stop at once)")
        if all(task.ended for task in driver.tasks.values()):
            return  # the summary follows
        counts, running = self._count(driver)
        line = [f"{len(driver.tasks)} trials: " + ", ".join(f"{count} {name}" for name, count in counts)]
        line += self._pace(driver, running)
        if self._live:
            self._redraw(line, running)
        elif self._printed[0] != counts or time.monotonic() - self._printed[1] > QUIET:
            self._printed = counts, time.monotonic()
            print("  ".join(line), file=self._stream, flush=True)

    def print_line(self, text: str) -> None:
        """Print a line that stays, in place of the redrawn lines."""
        self.end()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Erase the redrawn lines."""
        if self._lines:
            self._stream.write(_back(self._lines))
            self._stream.flush()
        self._lines = 0

    def _count(self, driver: Driver) -> tuple[tuple[tuple[str, int], ...], list[Task]]:
        """Return the number of trials in each state, and the running trials."""
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
        """Return the tokens per second and the time left as text, as far as they are known."""
        begun = {task.planned.id: store.progress(task.planned.folder) for task in driver.of(Stage.STARTED)}
        reports = {key: report for key, report in begun.items() if report is not None}
        if self._reached is None:
            planned = [task.planned for task in driver.tasks.values() if not task.ended]
            self._reached = {trial.id: store.reached(trial.folder) / trial.trial.training.steps for trial in planned}
        parts = self._reached | {key: report["step"] / report["steps"] for key, report in reports.items()}
        texts = []
        if speed := sum(reports.get(task.planned.id, {}).get("tokens_per_second", 0.0) for task in running):
            texts.append(f"{speed:,.0f} tokens/s")
        if (left := self._left(driver, parts, len(running))) is not None:
            texts.append(f"{clock(left)} left")
        return [*texts, *(["stopping at checkpoints"] if driver.stopping else [])]

    def _left(self, driver: Driver, parts: Mapping[str, float], slots: int) -> float | None:
        """Return the seconds left, by this sweep's pace once it is known, before by the speeds in the store."""
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
        known = [shares[key] * whole for key, whole in seconds.items() if whole is not None]
        return sum(known) / slots if len(known) == len(seconds) else None

    def _redraw(self, texts: list[str], running: list[Task]) -> None:
        size = shutil.get_terminal_size()
        width = size.columns - 1
        line = "  ".join(texts)
        head = [line] if len(line) <= width else [texts[0], "  " + "  ".join(texts[1:])]
        lines = [text[:width] for text in [*head, *(_task_line(task, width) for task in running)]][: size.lines - 2]
        self._stream.write(_back(self._lines) + "\n".join(lines))
        self._stream.flush()
        self._lines = len(lines)


def _back(lines: int) -> str:
    """Return the control sequence that moves to the first drawn line and erases everything below."""
    return "\r" + (f"\033[{lines - 1}A" if lines > 1 else "") + "\033[J"


def _task_line(task: Task, width: int) -> str:
    """Return the line of a running trial; on a narrow terminal the middle of its name is left out."""
    report = store.progress(task.planned.folder)
    name = task.planned.folder.path.name
    text = "" if report is None else f"  step {report['step']}/{report['steps']}  loss {report['loss']:.4f}"
    room = max(20, width - len(text) - 2)
    if len(name) > room:
        name = f"{name[: room - 13]}…{name[-12:]}"
    return f"  {name}{text}"


def clock(seconds: float) -> str:
    """Return a duration as `M:SS`, `H:MM:SS` or `D days H h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} {'day' if days == 1 else 'days'} {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
