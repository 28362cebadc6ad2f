"""lm-eval on a model of ours: from names of tasks to numbers.

Deterministic and without side effects: lm-eval seeds the global generators, and a trial that is evaluated midway must
go on as if it had not been, so they are put back. Tasks with local data (`dataset_path: json`) need no network.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits.experiments.evaluation.protocols import Model, Tokenizer
from fewbits.experiments.evaluation.tasks import TASK_GROUPS, shots

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

SEED = 1234  # lm-eval's default, for the examples that it draws and for all else that it seeds
BOOTSTRAPS = 1000  # resamples for the standard error of metrics that have no formula


def run_tasks(
    model: Model,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    length: int,
    batch: int = 16,
    end: int | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    run_code: bool = False,
) -> dict[str, dict[str, float]]:
    """Metrics by lm-eval task (and by group of lm-eval's, which pools its tasks), keyed as lm-eval does: "acc,none".

    Tasks are names of lm-eval, of YAML files under `include_path`, or of our groups of them (`tasks.TASK_GROUPS`).
    `length`, `batch` and `end` are those of `FewbitsLM`. `limit` takes so many questions of each task. Some tasks run
    the code that a model wrote, and want `run_code`.
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"limit={limit!r}: an integer from 1 up, or None for all questions")
    wanted = shots(tasks)
    _require_lm_eval()
    from lm_eval import evaluate

    from fewbits.experiments.evaluation.language_model import FewbitsLM

    lm = FewbitsLM(model, tokenizer, length=length, batch=batch, end=end)
    manager = _manager(wanted, include_path)
    _check_code(manager, wanted, run_code)
    with _seeded(), _environment(DISABLE_MULTIPROC="1", **({"HF_ALLOW_CODE_EVAL": "1"} if run_code else {})):
        found = evaluate(
            lm=lm,
            task_dict=_loaded(manager, wanted),
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            confirm_run_unsafe_code=run_code,
        )
    return {name: _numbers(metrics) for name, metrics in found["results"].items()}


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None, run_code: bool = False) -> None:
    """ValueError where `run_tasks` would end in one before it asks anything: for before a long training."""
    wanted = shots(tasks)
    _require_lm_eval()
    _check_code(_manager(wanted, include_path), wanted, run_code)


def _require_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name != "lm_eval":
            raise
        raise ValueError("downstream tasks need lm-eval: pip install 'fewbits[eval]'") from None


def _manager(wanted: Mapping[str, int | None], include_path: str | Path | None) -> "TaskManager":
    """lm-eval's index of tasks. Its own 14,000 take 10 seconds to read, and are left unread if the local ones do."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"include_path={str(include_path)!r}: not a folder (of lm-eval's YAML files)")
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(_complete(local, name) for name in wanted):
            return local
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in wanted if name not in manager.task_index]:
        near = get_close_matches(unknown[0], [*TASK_GROUPS, *manager.all_tasks])
        raise ValueError(
            f"task {', '.join(map(repr, unknown))}: valid are {', '.join(TASK_GROUPS)}, lm-eval's names"
            f" (lm-eval ls tasks) and those under include_path={include_path!r}"
            + (f"; near it are {', '.join(near)}" if near else "")
        )
    return manager


def _complete(manager: "TaskManager", name: str) -> bool:
    """Whether a task is in the index, and if it is a group, all that it holds."""
    if name not in manager.task_index:
        return False
    held = (manager.task_index[name].cfg or {}).get("task")
    return not isinstance(held, list) or all(isinstance(each, str) and _complete(manager, each) for each in held)


def _check_code(manager: "TaskManager", wanted: Mapping[str, int | None], run_code: bool) -> None:
    """Refused by name before anything is loaded: lm-eval stops late, and with a page of text."""
    unsafe = [name for name in wanted if (manager.task_index[name].cfg or {}).get("unsafe_code")]
    if unsafe and not run_code:
        raise ValueError(f"{', '.join(unsafe)} run the code that the model writes: pass run_code=True in a sandbox")


def _loaded(manager: "TaskManager", wanted: Mapping[str, int | None]) -> dict[str, dict[str, Any]]:
    """The tasks with their data and their numbers of examples, in the shape that lm-eval's `evaluate` takes."""
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name, few_shot in wanted.items():
        found: dict[str, Any] = manager.load([name])
        if twice := loaded["tasks"].keys() & found["tasks"].keys():
            raise ValueError(f"task {min(twice)} is asked for twice, by {name!r} and by one of {', '.join(wanted)}")
        for task in found["tasks"].values():
            if few_shot is not None:
                task.set_config(key="num_fewshot", value=few_shot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        for part in loaded:
            loaded[part] |= found[part]
    return loaded


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics, their standard errors where there are any ("acc_stderr,none"), and "sample_len", the questions asked."""
    return {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float, np.number))}


@contextmanager
def _seeded() -> Iterator[None]:
    """The global generators in a known state, and afterwards in the one they had."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Environment variables for a while. DISABLE_MULTIPROC: lm-eval would fork this process, threads and all."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
