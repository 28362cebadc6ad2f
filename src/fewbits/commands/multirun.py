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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fewbits.commands.sweep import check_cluster, in_store
from fewbits.common.arguments import warn_in_lines
from fewbits.common.process import environment
from fewbits.common.store_folder import runs_option, store_folder
from fewbits.experiments.composition import in_one_line, override_values, read_override, spelled
from fewbits.experiments.config import HYDRA_SETTINGS, is_hydra_setting, prepare, resolved
from fewbits.experiments.config_files import (
    FOLDER,
    GROUPS,
    ROOT,
    SEARCH_PATH,
    check_choice,
    folders,
    is_search_path,
    with_config_dir,
    with_globs,
)
from fewbits.sweeps.cluster.access import is_dashboard
from fewbits.sweeps.planning.plan import Plan, joined, plan_cells
from fewbits.sweeps.planning.stored_plans import MULTIRUN, UnusablePlan, load_plan, multirun_name, runs_named
from fewbits.sweeps.planning.sweep import cells_of_jobs, fixed_keys, sweep_of
from fewbits.sweeps.running.driver import Backend, Driver
from fewbits.sweeps.running.run_sweep import STOPPED, Where, conclude, run_trials, store_plan
from fewbits.sweeps.tracking.mirror import Mirror

LAUNCHER = "hydra/launcher="


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
    drivers: list[Driver] = field(default_factory=list)

    @cached_property
    def backend(self) -> Backend:
        """The backend, which starts at the first use."""
        return self.open.enter_context(contextlib.closing(self.where.open()))


_running: _Multirun | None = None


def run_multirun(options: argparse.Namespace) -> int:
    """Run the multirun that the options of the command define, and return the exit status."""
    global _running
    overrides = with_config_dir([text for text in options.overrides if text != MULTIRUN], options.config_dir)
    overrides = in_store(overrides, options.runs)
    _check(options, overrides)
    name, earlier = multirun_name(overrides), None
    runs = store_folder(runs_named(overrides) or "runs")
    with contextlib.suppress(UnusablePlan):
        earlier = load_plan(runs, [name])
    where = Where(options.backend, options.address, options.parallel, options.env)
    warn_in_lines()
    folder = runs / "plans" / "multirun" / name
    folder.mkdir(parents=True, exist_ok=True)  # sweepers write into it, and only Hydra's own launchers create it
    quiet = [f"hydra.sweep.dir={spelled(str(folder))}", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    sweeper = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith("hydra/sweeper=")), "")
    with contextlib.ExitStack() as open_backend:
        fixed = fixed_keys([text for text in overrides if not is_hydra_setting(text)])
        whole = earlier.plan if earlier else None
        own = folders(overrides).overrides
        _running = multirun = _Multirun(name, fixed, own, where, open_backend, sys.argv, whole)
        try:
            passed = [str(read_override(text).input_line) for text in overrides if not text.startswith(LAUNCHER)]
            run_hydra(["--multirun", f"{LAUNCHER}fewbits", *quiet], passed)
        except _Ended:  # some trials failed, or the user stopped the driver
            pass
        except ValueError as error:
            hint = f" (other sweepers are separate packages: pip install hydra-{sweeper}-sweeper)"
            raise ValueError(f"{error}{hint if sweeper and 'hydra/sweeper' in str(error) else ''}") from error
        except Exception as error:
            early = multirun.mirror is None and not sweeper
            if early or sys.flags.dev_mode or isinstance(error, ModuleNotFoundError):
                raise
            advice = "`python -X dev -m fewbits.cli train …` shows where"
            raise ValueError(f"hydra/sweeper={sweeper} failed: {type(error).__name__}: {error} ({advice})") from error
        finally:
            _running = None
    if multirun.whole is None or multirun.mirror is None:
        raise ValueError("train --multirun: the sweeper chose no trial: give a setting several values, as in seed=0,1")
    status = conclude(multirun.whole, multirun.drivers, multirun.mirror)
    best = folder / "optimization_results.yaml"  # which sweepers such as Optuna's write at the end
    if best.is_file():
        print(f"{best}: {' '.join(best.read_text('utf-8').split())}")
    if status != STOPPED:
        print(f"`fewbits status {shlex.quote(name)}{runs_option(runs)}` lists the trials of this multirun")
    return status


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raise ValueError for options and overrides that a multirun does not accept."""
    if refused := [name for name in ("cfg", "config", "id", "layers") if getattr(options, name)]:
        typed = "--multirun" if options.multirun else MULTIRUN
        raise ValueError(f"train: --{refused[0]} is valid for a single trial only: leave out {typed}, or this option")
    if is_dashboard(options.address):
        raise ValueError(f"train --multirun: --address {options.address} is a Ray dashboard: write auto, or HOST:PORT")
    check_cluster(options)
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~").replace("/", ".")
        used = key.startswith(("hydra.sweeper", "hydra.job.name", "hydra.callbacks", SEARCH_PATH))
        if is_hydra_setting(key) and not used and text != f"{LAUNCHER}fewbits":
            raise ValueError(f"{key}: {HYDRA_SETTINGS}")


def launch(jobs: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run Hydra's jobs, each given by its overrides, as trials; return their results in the same order."""
    assert _running is not None
    multirun = _running
    of_hydra, sys.argv = sys.argv, multirun.argv  # since each trial records the command in its provenance
    try:
        grid = cells_of_jobs(multirun.name, jobs, multirun.fixed, multirun.always)
        plan = plan_cells(sweep_of(multirun.name, grid), grid)
        multirun.whole = joined(multirun.whole, plan)
        store_plan(multirun.whole, [multirun.name])
        multirun.mirror = Mirror(multirun.whole)
        if driver := run_trials(plan, multirun.where, multirun.mirror, lambda: multirun.backend):
            multirun.drivers.append(driver)
            if driver.stopping:
                raise _Ended
        return [_job_return(plan, at, overrides) for at, overrides in enumerate(jobs)]
    finally:
        sys.argv = of_hydra


class _Ended(Exception):
    """Raised to end Hydra's loop if the sweeper reads the result of a failed trial, or if the user stops the driver."""


def _job_return(plan: Plan, at: int, overrides: Sequence[str]) -> JobReturn:
    """Return a job's result for the sweeper: its validation (or training) loss, infinity if the trial diverged."""
    folder = plan.trials[plan.members[at].id].folder
    returned = JobReturn(overrides=list(overrides), working_dir=str(folder.path), task_name=folder.path.name)
    if (result := folder.result()) is None:
        returned.status, returned.return_value = JobStatus.FAILED, _Ended(folder.path.name)
    else:
        loss = float(result.get("validation_loss", result["loss"])) if result["status"] == "done" else math.inf
        returned.status, returned.return_value = JobStatus.COMPLETED, loss
    return returned


# -------------------------------------------------------------------------------- Hydra's command line


def run_hydra(options: Sequence[str], overrides: Sequence[str]) -> None:
    """Run Hydra's command line with Hydra's options and the overrides; Hydra's errors become one-line ValueErrors."""
    own = folders(overrides)
    overrides = [with_globs(text, own) for text in overrides]
    _check_overrides(overrides)
    prepare(own)
    passed = [*own.overrides, *(text for text in overrides if not is_search_path(text))]
    try:
        with _arguments(*options, *passed):
            hydra.main(str(FOLDER), ROOT, version_base=None)(lambda _: None)()  # a launcher runs the trials, not this
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_one_line(error)) from error
    except SystemExit as error:
        if error.code:
            passed = [*options, *overrides]
            raise ValueError(f"train: Hydra does not accept {' '.join(passed)}; its message is above") from None


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise ValueError for an unknown key or config; unlike Hydra's own errors, it lists all valid choices.

    Of several values of a key that is no group, only the first is checked.
    """
    own, single = folders(overrides), []
    for text in overrides:
        values, key = override_values(text), text.partition("=")[0]
        for value in values if key in GROUPS else ():
            check_choice(key, value, own)
        if values and (is_search_path(text) or not is_hydra_setting(key)):
            override = read_override(text)
            swept = override.is_sweep_override()
            single.append(f"{key}={next(override.sweep_string_iterator())}" if swept else text)
    resolved(single)


@contextlib.contextmanager
def _arguments(*arguments: str) -> Iterator[None]:
    """Make `hydra.main`, inside the `with` block, read these arguments and raise errors instead of printing them."""
    outer = sys.argv, GlobalHydra.instance().hydra
    sys.argv = [sys.argv[0], *arguments]
    GlobalHydra.instance().clear()
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv, GlobalHydra.instance().hydra = outer
