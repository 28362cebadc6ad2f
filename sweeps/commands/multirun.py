"""Run a grid of trials as one sweep (`fewbits train --multirun`): Hydra chooses the trials, its launcher runs them.

Hydra's own sweeper makes the grid of `key=a,b`, `range(…)` and `choice(…)`. `hydra/sweeper=` chooses another installed
sweeper, for example Optuna's, which gets the validation loss of each trial.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fewbits.common.arguments import CommandParser
from fewbits.common.environment import environment
from fewbits.common.store_folder import store_folder
from fewbits.experiments.config import FOLDER, ROOT, check_keys, in_one_line, prepare
from fewbits.sweeps.cluster.address import is_dashboard
from fewbits.sweeps.commands.sweep import add_where, check_cluster
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.plan import Plan, plan_cells
from fewbits.sweeps.planning.sweep import SEED, Sweep
from fewbits.sweeps.running.run_sweep import run_sweep

EXAMPLES = """\
examples:
  fewbits train --multirun recipe=mor/block recipe.threshold=0.03,0.045 seed=0,1
  fewbits train --multirun 'training.steps=range(10,50,10)' hydra/sweeper=basic
"""
FLAGS = ("-m", "--multirun")
NAME = "multirun"
QUOTES = "\"'"
_OPTIONS: dict[str, Any] = {}  # of the running command; a global, since Hydra passes no options to a launcher
_STATUSES: list[int] = []  # exit statuses of the sweeps that the launcher has run


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits train --multirun", __doc__, EXAMPLES)
    parser.add_argument(
        "overrides", nargs="+", metavar="OVERRIDE", help="a setting, KEY=VALUE, or KEY=A,B for several values"
    )
    parser.add_argument(*FLAGS, action="store_true", help=argparse.SUPPRESS)
    add_where(parser)
    options = parser.parse_intermixed_args(argv)
    overrides = options.overrides
    _OPTIONS.update(backend=options.backend, address=options.address, parallel=options.parallel, variables=options.env)
    _STATUSES.clear()
    if is_dashboard(options.address):
        raise ValueError(
            f"train --multirun: --address {options.address} is a Ray dashboard, which only `fewbits sweep FILE` can "
            "use; name a Ray cluster that this machine has joined: auto, or HOST:PORT"
        )
    check_cluster(options)
    check_keys(overrides)
    prepare()
    runs = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith("runtime.runs=")), "runs")
    folder = store_folder(runs.strip(QUOTES)) / "plans" / NAME
    quiet = [f"hydra.sweep.dir={folder}", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    try:
        with _command_line("--multirun", "hydra/launcher=fewbits", *quiet, *overrides):
            hydra.main(str(FOLDER), ROOT, version_base=None)(_unused)()
    except (HydraException, OmegaConfBaseException) as error:
        single = [text for text in overrides if not re.match(r"hydra\b", text) and not re.search(r"[,(]", text)]
        raise ValueError(in_one_line(error, single).partition(" Config search path:")[0] + _hint(overrides)) from error
    except _Failed:
        pass
    return max(_STATUSES, default=0)


@contextmanager
def _command_line(*arguments: str) -> Iterator[None]:
    """Let `hydra.main` read these arguments and raise its errors; otherwise it would print errors and exit."""
    outer = sys.argv, GlobalHydra.instance().hydra
    sys.argv = [sys.argv[0], *arguments]
    GlobalHydra.instance().clear()
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv, GlobalHydra.instance().hydra = outer


def _hint(overrides: Sequence[str]) -> str:
    sweepers = [text.partition("=")[2] for text in overrides if text.startswith("hydra/sweeper=")]
    return f" (other sweepers are separate packages: pip install hydra-{sweepers[-1]}-sweeper)" if sweepers else ""


def launch(jobs: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run Hydra's jobs, each the overrides of one trial, as one sweep, and return their results."""
    grid = cells(jobs)
    axes: dict[str, dict[str, list[str]]] = {}
    for key, value in (axis for cell in grid for axis in cell.axes):
        axes.setdefault(key, {})[value] = [f"{key}={value}"]
    plan = plan_cells(Sweep(NAME, study="train", axes=axes), grid)
    _STATUSES.append(run_sweep(plan, **_OPTIONS, overrides=[NAME, *_merged_overrides(jobs)]))
    return [_job_return(plan, at, overrides) for at, overrides in enumerate(jobs)]


def _merged_overrides(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return one override for each key, with the values that it has in any of the jobs."""
    values: dict[str, dict[str, None]] = {}
    for key, _, value in (override.partition("=") for overrides in jobs for override in overrides):
        values.setdefault(key, {})[value] = None
    return [f"{key}={','.join(of_key)}" for key, of_key in values.items()]


def cells(jobs: Sequence[Sequence[str]]) -> list[Cell]:
    """Return a cell for each job. The axes are the keys whose values are not the same in all jobs."""
    keyed = [dict(override.partition("=")[::2] for override in overrides) for overrides in jobs]
    swept = [key for key in keyed[0] if len({overrides.get(key) for overrides in keyed}) > 1 and key != SEED]
    return [
        Cell(
            sweep=NAME,
            arm="",
            axes=tuple((key, overrides[key]) for key in swept),
            seed=int(overrides.get(SEED, "0")),
            overrides=tuple(f"{key}={value}" for key, value in overrides.items()),
        )
        for overrides in keyed
    ]


class _Returned(JobReturn):
    """The result of a job. Hydra's class would report a failed trial, which the sweep has done already."""

    @property
    def return_value(self) -> Any:
        if self.status != JobStatus.COMPLETED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


class _Failed(Exception):
    """The error that is raised when Hydra asks for the result of a failed trial."""


def _job_return(plan: Plan, at: int, overrides: Sequence[str]) -> JobReturn:
    member = plan.members[at]
    folder = plan.trials[member.id].folder
    result = folder.result()
    returned = _Returned(overrides=list(overrides), working_dir=str(folder.path), task_name=folder.path.name)
    returned.status = JobStatus.COMPLETED if result else JobStatus.FAILED
    returned.return_value = result.get("validation_loss", result.get("loss")) if result else _Failed(folder.path.name)
    return returned


def _unused(config: object) -> None:
    """Stand in for the task function that Hydra requires; the launcher runs the trials."""
