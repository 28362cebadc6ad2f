"""Run the jobs of Hydra's sweeper as the trials of one sweep, for the command `fewbits train --multirun`.

A job is Hydra's word for the overrides of one trial. Hydra's launcher `fewbits` calls `launch` in the command's
process, once or, for some sweepers, several times.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from fewbits.commands.run_hydra import run_hydra
from fewbits.commands.sweep import check_cluster
from fewbits.common.arguments import warn_in_lines
from fewbits.common.store_folder import runs_option, store_folder
from fewbits.experiments.config import HYDRA_SETTINGS, is_hydra_setting
from fewbits.experiments.config_files import SEARCH_PATH, folders, with_config_dir
from fewbits.sweeps.cluster.access import is_dashboard
from fewbits.sweeps.planning.multiruns import MODE, cells, fixed_keys, joined, multirun_name, sweep_of
from fewbits.sweeps.planning.plan import Plan, plan_cells
from fewbits.sweeps.planning.stored_plans import UnusablePlan, load_plan, runs_named
from fewbits.sweeps.running.backend import Backend
from fewbits.sweeps.running.driver import Driver, unfinished
from fewbits.sweeps.running.run_sweep import STOPPED, Where, conclude, run_trials, store_plan
from fewbits.sweeps.tracking.mlflow_view import Mirror

FOLDER = "multirun"  # the folder in `plans/` for the files that sweepers themselves write
RESULTS = "optimization_results.yaml"  # the file that sweepers such as Optuna's write at the end: the best values
LAUNCHER = "hydra/launcher="
DEBUG = "`python -X dev -m fewbits.cli train …` shows where"


@dataclass
class _Multirun:
    """The state of the running `fewbits train --multirun`: a global, since Hydra cannot pass it to the launcher."""

    name: str
    fixed: set[str]  # keys with the same value in all trials
    always: tuple[str, ...]  # overrides that apply to every trial, but that Hydra does not pass to jobs
    where: Where
    open: contextlib.ExitStack  # closes the backend at the end
    argv: list[str]  # the command's own arguments; Hydra replaces sys.argv
    whole: Plan | None = None  # the plan of all trials so far, including those of earlier calls of the command
    mirror: Mirror | None = None
    backend: Backend | None = None
    drivers: list[Driver] = field(default_factory=list)

    def opened(self) -> Backend:
        """Start the backend on the first call, and return it; later calls return the same backend."""
        if self.backend is None:
            self.backend = self.open.enter_context(contextlib.closing(self.where.open()))
        return self.backend


_running: _Multirun | None = None


def run_multirun(options: argparse.Namespace) -> int:
    """Run the multirun that the options of the command define, and return the exit status."""
    overrides = with_config_dir([text for text in options.overrides if text != MODE], options.config_dir)
    _check(options, overrides)
    name, stored = multirun_name(overrides), None
    runs = store_folder(runs_named(overrides) or "runs")
    with contextlib.suppress(UnusablePlan):
        stored = load_plan(runs, [name])
    where = Where(options.backend, options.address, options.parallel, options.env)
    warn_in_lines()
    return _run(name, stored.plan if stored else None, overrides, where, runs)


def _run(name: str, earlier: Plan | None, overrides: Sequence[str], where: Where, runs: Path) -> int:
    """Let Hydra run the multirun, print the summary, and return the exit status.

    earlier: the plan that earlier calls of the same multirun have stored, or None. overrides: those of the command,
    among them settings of Hydra. where: the backend for the trials. runs: the store.
    """
    global _running
    folder = runs / "plans" / FOLDER / name
    own = folders(overrides).overrides
    quiet = [f"hydra.sweep.dir={folder}", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    passed = [text for text in overrides if not text.startswith(LAUNCHER)]
    folder.mkdir(parents=True, exist_ok=True)  # sweepers write into it, and only Hydra's own launchers create it
    with contextlib.ExitStack() as open_backend:
        fixed = fixed_keys([text for text in overrides if not is_hydra_setting(text)])
        _running = multirun = _Multirun(name, fixed, own, where, open_backend, sys.argv, earlier)
        try:
            run_hydra(["--multirun", f"{LAUNCHER}fewbits", *quiet], passed)
        except _Ended:  # some trials failed, or the user stopped the driver
            pass
        except ValueError as error:
            raise ValueError(f"{error}{_hint(overrides) if 'hydra/sweeper' in str(error) else ''}") from error
        except Exception as error:
            if sys.flags.dev_mode or (multirun.mirror is None and not _sweeper(overrides)):
                raise
            raise ValueError(f"hydra/sweeper={_sweeper(overrides)} failed: {_reason(error)} ({DEBUG})") from error
        finally:
            _running = None
    if multirun.whole is None or multirun.mirror is None:
        raise ValueError("train --multirun: the sweeper chose no trial: give a setting several values, as in seed=0,1")
    status = conclude(multirun.whole, multirun.drivers, multirun.mirror)
    if (folder / RESULTS).is_file():
        print(f"{folder / RESULTS}: {' '.join((folder / RESULTS).read_text('utf-8').split())}")
    if status != STOPPED:
        print(f"`fewbits status {shlex.quote(name)}{runs_option(runs)}` lists the trials of this multirun")
    return status


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raise ValueError for options and overrides that a multirun does not accept."""
    if refused := [name for name in ("cfg", "info", "hydra_help", "shell_completion", "run") if getattr(options, name)]:
        typed = "--multirun" if options.multirun else MODE
        raise ValueError(
            f"train: --{refused[0].replace('_', '-')} is valid for a single trial only: leave out {typed}, or this "
            "option"
        )
    if is_dashboard(options.address):
        raise ValueError(
            f"train --multirun: --address {options.address} is a Ray dashboard, to which only `fewbits sweep` can "
            "submit; give the address of a Ray cluster that this machine has joined: auto, or HOST:PORT"
        )
    check_cluster(options)
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~").replace("/", ".")
        used = key.startswith(("hydra.sweeper", "hydra.job.name", "hydra.callbacks", SEARCH_PATH))
        if is_hydra_setting(key) and not used and text != f"{LAUNCHER}fewbits":
            raise ValueError(f"{key}: {HYDRA_SETTINGS}")


def _sweeper(overrides: Sequence[str]) -> str:
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("hydra/sweeper=")]
    return chosen[-1] if chosen else ""


def _reason(error: Exception) -> str:
    """Return an error's type and message, or, if it has no message (like a bare `assert`), the line that raised it."""
    text = " ".join(str(error).split())
    if not text:
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{at.line} ({at.filename}, line {at.lineno})"
    return f"{type(error).__name__}: {text}"


def _hint(overrides: Sequence[str]) -> str:
    sweeper = _sweeper(overrides)
    return f" (other sweepers are separate packages: pip install hydra-{sweeper}-sweeper)" if sweeper else ""


def launch(jobs: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run Hydra's jobs as trials of the multirun, and return their results in the same order.

    jobs: the overrides of each job.
    """
    assert _running is not None
    multirun = _running
    of_hydra, sys.argv = sys.argv, multirun.argv  # since each trial records the command in its provenance
    try:
        return _launch(multirun, jobs)
    finally:
        sys.argv = of_hydra


def _launch(multirun: _Multirun, jobs: Sequence[Sequence[str]]) -> list[JobReturn]:
    grid = cells(multirun.name, jobs, multirun.fixed, multirun.always)
    plan = plan_cells(sweep_of(multirun.name, grid), grid)
    multirun.whole = joined(multirun.whole, plan)
    store_plan(multirun.whole, [multirun.name])
    multirun.mirror = Mirror(multirun.whole)
    if unfinished(plan):
        driver = run_trials(plan, multirun.where, multirun.mirror, multirun.opened)
        if driver is not None:
            multirun.drivers.append(driver)
            if driver.stopping:
                raise _Ended
    return [_job_return(plan, at, overrides) for at, overrides in enumerate(jobs)]


class _Returned(JobReturn):
    """The result of a job. Hydra's own class would also log a failed trial's error, which the sweep prints itself."""

    @property
    def return_value(self) -> Any:
        if self.status != JobStatus.COMPLETED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


class _Ended(Exception):
    """Raised to end Hydra's loop if the sweeper reads the result of a failed trial, or if the user stops the driver."""


def _job_return(plan: Plan, at: int, overrides: Sequence[str]) -> JobReturn:
    member = plan.members[at]
    folder = plan.trials[member.id].folder
    result = folder.result()
    returned = _Returned(overrides=list(overrides), working_dir=str(folder.path), task_name=folder.path.name)
    returned.status = JobStatus.COMPLETED if result else JobStatus.FAILED
    returned.return_value = _objective(result) if result else _Ended(folder.path.name)
    return returned


def _objective(result: dict[str, Any]) -> float:
    """Return the number that a sweeper minimizes: the validation loss, or the training loss if there is none.

    It is infinity if the trial diverged.
    """
    return float(result.get("validation_loss", result["loss"])) if result["status"] == "done" else math.inf
