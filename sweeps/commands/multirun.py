"""`fewbits train --multirun`: Hydra says which trials, its launcher `fewbits` has them run as one sweep.

Hydra's own sweeper makes the grid of `key=a,b`, `range(…)` and `choice(…)`; others that are installed, Optuna's say,
are chosen by `hydra/sweeper=` and are told the validation loss of each trial.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder
from fewbits.experiments.config import FOLDER, ROOT, check_keys, in_one_line, prepare
from fewbits.sweeps.commands.sweep import add_where
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
_OPTIONS: dict[str, Any] = {}  # of the command that runs: Hydra's launchers take none
_STATUSES: list[int] = []  # of the sweeps that the launcher has run


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits train --multirun", __doc__, EXAMPLES)
    parser.add_argument("words", nargs="+", metavar="WORD", help="of the config; KEY=A,B for several values")
    parser.add_argument(*FLAGS, action="store_true", help=argparse.SUPPRESS)
    add_where(parser)
    options = parser.parse_intermixed_args(argv)
    words = options.words
    _OPTIONS.update(backend=options.backend, address=options.address, parallel=options.parallel, variables=options.env)
    _STATUSES.clear()
    if (options.address or "").startswith(("http://", "https://")):
        raise ValueError(
            f"train --multirun: --address {options.address} takes jobs, which `fewbits sweep FILE` submits; "
            "here it is of a Ray cluster that this machine is part of: auto, or HOST:PORT"
        )
    check_keys(words)
    prepare()
    runs = next((word.partition("=")[2] for word in reversed(words) if word.startswith("runtime.runs=")), "runs")
    folder = store_folder(runs.strip(QUOTES)) / "plans" / NAME
    quiet = [f"hydra.sweep.dir={folder}", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2("fewbits", create_config_search_path(str(FOLDER)))
        hydra.multirun(ROOT, _unused, ["hydra/launcher=fewbits", *quiet, *words], with_log_configuration=False)
    except (HydraException, OmegaConfBaseException) as error:
        single = [word for word in words if not re.match(r"hydra\b", word) and not re.search(r"[,(]", word)]
        raise ValueError(in_one_line(error, single).partition(" Config search path:")[0] + _hint(words)) from error
    except _Failed:
        pass
    finally:
        GlobalHydra.instance().hydra = before
    return max(_STATUSES, default=0)


def _hint(words: Sequence[str]) -> str:
    sweepers = [word.partition("=")[2] for word in words if word.startswith("hydra/sweeper=")]
    return f" (other sweepers are packages of their own: pip install hydra-{sweepers[-1]}-sweeper)" if sweepers else ""


def launch(jobs: Sequence[Sequence[str]]) -> list[JobReturn]:
    """What the launcher does with Hydra's jobs, each the words of one trial."""
    laid_out = cells(jobs)
    axes: dict[str, dict[str, list[str]]] = {}
    for key, value in (axis for cell in laid_out for axis in cell.axes):
        axes.setdefault(key, {})[value] = [f"{key}={value}"]
    plan = plan_cells(Sweep(NAME, study="train", axes=axes), laid_out)
    _STATUSES.append(run_sweep(plan, **_OPTIONS, overrides=[NAME, *_words_of_all(jobs)]))
    return [_returned(plan, at, words) for at, words in enumerate(jobs)]


def _words_of_all(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return one word for each key, with the values that it has in any of the jobs."""
    values: dict[str, dict[str, None]] = {}
    for key, _, value in (word.partition("=") for words in jobs for word in words):
        values.setdefault(key, {})[value] = None
    return [f"{key}={','.join(found)}" for key, found in values.items()]


def cells(jobs: Sequence[Sequence[str]]) -> list[Cell]:
    """Their axes are the keys whose values are not the same in all jobs."""
    keyed = [dict(word.partition("=")[::2] for word in words) for words in jobs]
    swept = [key for key in keyed[0] if len({words.get(key) for words in keyed}) > 1 and key != SEED]
    return [
        Cell(
            sweep=NAME,
            arm="",
            axes=tuple((key, words[key]) for key in swept),
            seed=int(words.get(SEED, "0")),
            words=tuple(f"{key}={value}" for key, value in words.items()),
        )
        for words in keyed
    ]


class _Returned(JobReturn):
    """Of a trial that failed, as the sweep has told already; Hydra's own would print a line more."""

    @property
    def return_value(self) -> Any:
        if self.status != JobStatus.COMPLETED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


class _Failed(Exception):
    """A trial without a result: raised where Hydra asks for it."""


def _returned(plan: Plan, at: int, words: Sequence[str]) -> JobReturn:
    member = plan.members[at]
    folder = plan.trials[member.id].folder
    result = folder.result()
    returned = _Returned(overrides=list(words), working_dir=str(folder.path), task_name=folder.path.name)
    returned.status = JobStatus.COMPLETED if result else JobStatus.FAILED
    returned.return_value = result.get("validation_loss", result.get("loss")) if result else _Failed(folder.path.name)
    return returned


def _unused(config: object) -> None:
    """Hydra wants a task; ours are run by the launcher."""
