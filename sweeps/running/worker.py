"""Train one trial in a worker process: redirect the output to its log, train, and return the outcome.

The worker writes `progress.json`, `log.txt` and `failure.json` in the run folder; the driver, `fewbits status` and
users read them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fewbits.common.process import environment
from fewbits.common.wording import differences
from fewbits.experiments.identity import ROOT, running, total
from fewbits.experiments.session import Events, Progress
from fewbits.experiments.storage import lease
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.training import run
from fewbits.sweeps.planning.store import FAILURE, LOG, PROGRESS, Failure, last_lines, reached, write_failure
from fewbits.sweeps.running.driver import Job, Outcome

EVERY = 1.0  # seconds between two updates of progress.json
LOGGED = 20  # about how many lines of progress the log of a trial gets, from its first to its last step


class _Planned(Events):
    """Refuses the trial on every rank if it is not the planned one."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def begin(self, folder: RunFolder, identity: Mapping[str, Any]) -> None:
        job = self._job
        if (here := total(running())) != job.sources:
            raise ValueError(
                f"{ROOT} on {os.uname().nodename} has other sources that compute (digest {here[:12]}) than the driver "
                f"({job.sources[:12]}): install the same version of fewbits on all machines"
            )
        if folder.id != job.id:
            differing = "; ".join(differences(job.made_of, identity))
            raise ValueError(f"here the trial has another id than in the plan, since these differ: {differing}")


def work(job: Job) -> Outcome:
    """Compute a job in this process, and return its outcome. Only rank 0 handles errors."""
    with environment(job.environment):
        job.path.mkdir(parents=True, exist_ok=True)
        if not job.leads:
            with _logged(job.path / LOG):
                try:
                    run(job.trial, job.runtime, _Planned(job))
                except KeyboardInterrupt:  # raised in all ranks when rank 0 was asked to stop
                    return Outcome("stopped")
            return Outcome("over")
        if (holder := lease.holder(job.path)) is not None:  # before anything is written to its log
            return Outcome("busy", str(lease.Held(job.path, holder)))
        try:
            return _lead(job)
        except OSError as error:  # not handled by `_lead`, for example on a full disk if the log cannot be written
            return Outcome("failed", _describe(error))


def _lead(job: Job) -> Outcome:
    folder = job.folder
    with _logged(job.path / LOG) as log:
        report = _Reporter(job, log)
        try:
            _, result = run(job.trial, job.runtime, report)
        except (lease.Held, lease.Lost) as error:
            report.line(str(error))
            return Outcome("busy", str(error))
        except KeyboardInterrupt:
            report.line("stopped at a checkpoint")
            return Outcome("stopped")
        except Exception as error:
            traceback.print_exc()
            reason, wrong_input = _describe(error), isinstance(error, ValueError)
            report.line(f"failed: {reason}")
            write_failure(folder, Failure(reason, wrong_input, reached(folder), last_lines(folder)))
            return Outcome("failed", reason, wrong_input)
        report.line(f"{result['status']} at step {result['step']}")
    for name in (FAILURE, PROGRESS):
        (job.path / name).unlink(missing_ok=True)
    return Outcome("over", speed=report.speed)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class _Reporter(_Planned):
    """Writes the trial's progress: to progress.json every EVERY seconds, and about LOGGED lines to the log."""

    def __init__(self, job: Job, log: IO[str]) -> None:
        super().__init__(job)
        self._path, self._log = job.path / PROGRESS, log
        self._next, self._part = 0.0, -1
        self._speeds: list[float] = []

    @property
    def speed(self) -> float | None:
        speeds = sorted(self._speeds[1:])  # without the first step, which is slower, since it includes the warm-up
        return speeds[len(speeds) // 2] if speeds else None

    def step(self, progress: Progress) -> None:
        self._speeds.append(progress.tokens_per_second)
        now = time.monotonic()
        if now >= self._next or progress.step == progress.steps:
            self._next = now + EVERY
            keys = ("step", "steps", "loss", "tokens_per_second")
            report = {**{key: getattr(progress, key) for key in keys}, "time": time.time()}
            part = self._path.with_name(f".{self._path.name}.partial")
            part.write_text(json.dumps(report))
            os.replace(part, self._path)
        if (part_done := LOGGED * progress.step // progress.steps) != self._part:
            self._part = part_done
            speed = f"{progress.tokens_per_second:,.0f} tokens/s"
            self.line(f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  {speed}")

    def line(self, text: str) -> None:
        _print(self._log, text)


def _print(log: IO[str], text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}", file=log, flush=True)


@contextmanager
def _logged(path: Path) -> Iterator[IO[str]]:
    """Append everything that this process prints to the log, including output of libraries and tracebacks of crashes.

    Yield the open log file.
    """
    with path.open("a", buffering=1, encoding="utf-8") as log:
        before = [os.dup(stream) for stream in (1, 2)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        faulthandler.enable(log)
        _print(log, f"process {os.getpid()} of {os.uname().nodename}")
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(" ".join(str(message).split()), file=log)
            try:
                yield log
            finally:
                faulthandler.disable()
                for stream, saved in zip((1, 2), before, strict=True):
                    os.dup2(saved, stream)
                    os.close(saved)
