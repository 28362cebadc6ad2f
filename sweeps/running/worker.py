"""What a worker does with one trial, in whatever process a backend puts it: lease, log, train, and say how it ended.

Nothing is sent but files in the run folder, where the driver, `fewbits status` and people read them: `progress.json`,
`log.txt`, and `failure.json`. A file `stop` in it asks the trial to end after its step, at a checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from fewbits.common.atomic import remove_folder
from fewbits.experiments.runs import checkpoints
from fewbits.experiments.runs.run_folder import Busy, RunFolder
from fewbits.experiments.training import OtherTrial, Progress, run
from fewbits.experiments.trial import Runtime, Trial
from fewbits.sweeps.commands.explanation import differences
from fewbits.sweeps.running import lease
from fewbits.sweeps.running.store import FAILURE, LOG, PROGRESS, STOP, Failure, last_lines, reached, write_failure

EVERY = 1.0  # seconds between reports
LOGGED = 20  # lines of progress to a trial


@dataclass(frozen=True)
class Job:
    """One trial, or one rank of it, to be worked on."""

    id: str
    path: Path
    trial: Trial
    runtime: Runtime
    made_of: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)  # RANK and its like, of several ranks

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path, self.id)

    @property
    def leads(self) -> bool:
        return self.environment.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Outcome:
    """over: there is a result. stopped: asked to. busy: another worker has it. failed: an error, which may pass."""

    kind: str
    reason: str = ""
    wrong_input: bool = False
    speed: float | None = None  # tokens a second, of the median step


def work(job: Job) -> Outcome:
    with _environment(job.environment):
        if not job.leads:
            job.path.mkdir(parents=True, exist_ok=True)
            with _logged(job.path / LOG):
                run(job.trial, job.runtime, expected=job.id)
            return Outcome("over")
        try:
            with lease.leased(job.path) as lost:
                return _lead(job, lost.is_set)
        except lease.Held as error:
            return Outcome("busy", str(error))
        except OSError as error:  # on a full disk not even the log can be written
            return Outcome("failed", _told(error, job))


def _lead(job: Job, lost: Callable[[], bool]) -> Outcome:
    folder, request = job.folder, job.path / STOP
    request.unlink(missing_ok=True)
    with _logged(job.path / LOG) as log:
        report = _Reporter(job.path / PROGRESS, log)

        def say(progress: Progress) -> None:
            if lost():
                raise _Lost
            report(progress)

        try:
            _, result = run(job.trial, _reopened(job), say, request.exists, expected=job.id)
        except _Lost:
            report.line("its lease is lost: another worker has it, or its folder was removed")
            return Outcome("busy", "its lease was lost")
        except KeyboardInterrupt:
            report.line("stopped at a checkpoint")
            return Outcome("stopped")
        except Busy as error:  # by `fewbits train`, which holds no lease
            report.line(str(error))
            return Outcome("busy", str(error))
        except Exception as error:
            traceback.print_exc()
            reason, wrong_input = _told(error, job), isinstance(error, (ValueError, OtherTrial))
            report.line(f"failed: {reason}")
            write_failure(folder, Failure(reason, wrong_input, reached(folder), last_lines(folder)))
            return Outcome("failed", reason, wrong_input)
        finally:
            request.unlink(missing_ok=True)
        report.line(f"{result['status']} at step {result['step']}")
    for name in (FAILURE, PROGRESS):
        (job.path / name).unlink(missing_ok=True)
    return Outcome("over", speed=report.speed)


def _reopened(job: Job) -> Runtime:
    """A trial that has gone past a step whose checkpoint is now asked for goes on from before it. Checkpoints of later
    steps, from which it would go on else, are made again, those that were kept among them."""
    folder, wanted = job.folder, job.runtime.keep_steps
    with folder.alone():
        kept = checkpoints.steps(folder.kept)
        first = min((step for step in wanted if not folder.has([step])), default=math.inf)
        for place in (folder.checkpoints, folder.kept):
            for step, path in checkpoints.steps(place).items():
                if step > first:
                    remove_folder(path)
    return job.runtime if first == math.inf else replace(job.runtime, keep_steps=tuple(sorted({*wanted, *kept})))


class _Lost(Exception):
    """The lease. What this worker would write now, checkpoints of earlier steps above all, the next one has to bear."""


def _told(error: Exception, job: Job) -> str:
    if isinstance(error, OtherTrial):
        differing = "; ".join(differences(job.made_of, error.made_of))
        return f"this machine would compute another trial than was planned: {differing}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class _Reporter:
    """Progress, into files: the newest state every second, and a few lines of log."""

    def __init__(self, path: Path, log: IO[str]) -> None:
        self._path, self._log = path, log
        self._next, self._part = 0.0, -1
        self._speeds: list[float] = []

    @property
    def speed(self) -> float | None:
        speeds = sorted(self._speeds[1:])  # the first step warms up
        return speeds[len(speeds) // 2] if speeds else None

    def __call__(self, progress: Progress) -> None:
        self._speeds.append(progress.tokens_per_second)
        now = time.monotonic()
        if now >= self._next or progress.step == progress.steps:
            self._next = now + EVERY
            part = self._path.with_name(f".{self._path.name}.partial")
            part.write_text(
                json.dumps(
                    {
                        "step": progress.step,
                        "steps": progress.steps,
                        "loss": progress.loss,
                        "tokens_per_second": progress.tokens_per_second,
                        "time": time.time(),
                    }
                )
            )
            os.replace(part, self._path)
        if (part_done := LOGGED * progress.step // progress.steps) != self._part:
            self._part = part_done
            speed = f"{progress.tokens_per_second:,.0f} tokens/s"
            self.line(f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  {speed}")

    def line(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}", file=self._log, flush=True)


@contextmanager
def _logged(path: Path) -> Iterator[IO[str]]:
    """Everything that the process prints, libraries and crashes included, goes to the trial's log meanwhile."""
    with path.open("a", buffering=1, encoding="utf-8") as log:
        before = [os.dup(stream) for stream in (1, 2)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        faulthandler.enable(log)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  process {os.getpid()} of {os.uname().nodename}", file=log)
        with (
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            warnings.catch_warnings(),
        ):
            warnings.showwarning = lambda message, *_: print(" ".join(str(message).split()), file=log)
            try:
                yield log
            finally:
                faulthandler.disable()
                for stream, saved in zip((1, 2), before, strict=True):
                    os.dup2(saved, stream)
                    os.close(saved)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
