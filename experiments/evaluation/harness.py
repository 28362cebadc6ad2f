"""Run lm-eval tasks on a model of ours and return their metrics.

This is deterministic and has no side effects: lm-eval seeds the global generators, so their states are restored, and a
trial that is evaluated midway continues unchanged. Tasks with local data (`dataset_path: json`) need no network.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits.common.environment import environment
from fewbits.experiments.evaluation.protocols import Model, Tokenizer
from fewbits.experiments.evaluation.tasks import TASK_GROUPS, shots

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

SEED = 1234  # lm-eval's default, for the few-shot examples and everything else that it seeds
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
) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by each requested name, the metrics of its lm-eval tasks and, pooled, of lm-eval's groups of them.

    The metrics' keys are lm-eval's, such as "acc,none". A group's members are among its results.
    `tasks` are names of lm-eval's tasks or groups, of YAML files under `include_path`, or of `tasks.TASK_GROUPS`.
    `length`, `batch` and `end` are those of `FewbitsLM`. `limit` is the number of questions of each task (None: all).
    Tasks that execute code written by the model need `run_code`.
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"limit={limit!r}: an integer of 1 or more, or None for all questions, is expected")
    wanted = shots(tasks)
    _require_lm_eval()
    from lm_eval import evaluate

    from fewbits.experiments.evaluation.language_model import FewbitsLM

    lm = FewbitsLM(model, tokenizer, length=length, batch=batch, end=end)
    manager = _manager(wanted, include_path)
    _check_code(manager, wanted, run_code)
    # Without DISABLE_MULTIPROC lm-eval would fork this process with threads.
    with _seeded(), environment({"DISABLE_MULTIPROC": "1", **({"HF_ALLOW_CODE_EVAL": "1"} if run_code else {})}):
        loaded, parts = _load(manager, wanted)
        evaluated = evaluate(
            lm=lm,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            confirm_run_unsafe_code=run_code,
        )
    results = {name: _numbers(metrics) for name, metrics in evaluated["results"].items()}
    return {
        task: {name: results[name] for each in shots([task]) for name in parts[each] if name in results}
        for task in tasks
    }


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None, run_code: bool = False) -> None:
    """Raise, before training starts, the ValueError that `run_tasks` would raise for these tasks."""
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
    """Return an index of lm-eval's tasks and those under `include_path`.

    lm-eval's own 14,000 tasks take 10 s to read, so they are left out if the local ones suffice.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"include_path={str(include_path)!r}: a folder of lm-eval YAML files is expected")
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(_complete(local, name) for name in wanted):
            return local
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in wanted if name not in manager.task_index]:
        near = get_close_matches(unknown[0], [*TASK_GROUPS, *manager.all_tasks])
        raise ValueError(
            f"unknown task {', '.join(map(repr, unknown))}: valid tasks are {', '.join(TASK_GROUPS)}, those of lm-eval"
            f" (lm-eval ls tasks) and those of a folder of YAML files, include_path={include_path or 'DIR'}"
            + (f"; did you mean {', '.join(near)}" if near else "")
        )
    return manager


def _complete(manager: "TaskManager", name: str) -> bool:
    """Tell whether a task is in the index, and for a group also all of its members."""
    if name not in manager.task_index:
        return False
    members = (manager.task_index[name].cfg or {}).get("task")
    return not isinstance(members, list) or all(isinstance(name, str) and _complete(manager, name) for name in members)


def _check_code(manager: "TaskManager", wanted: Mapping[str, int | None], run_code: bool) -> None:
    """Raise ValueError for tasks that run code, before anything is loaded; lm-eval fails later and with a long text."""
    unsafe = [name for name in wanted if (manager.task_index[name].cfg or {}).get("unsafe_code")]
    if unsafe and not run_code:
        raise ValueError(
            f"{', '.join(unsafe)} run code that the model writes: use a sandbox, and allow it with run_code=True"
        )


def _load(
    manager: "TaskManager", wanted: Mapping[str, int | None]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return the tasks as lm-eval's `evaluate` expects them, and the tasks and groups that each wanted name means.

    The tasks have their data and their numbers of few-shot examples.
    """
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    parts: dict[str, list[str]] = {}
    for name, few_shot in wanted.items():
        try:
            one: dict[str, Any] = manager.load([name])
        except OSError as error:  # of the file system, or of `datasets` without a network
            reason = " ".join(str(error).split())
            raise ValueError(f"task {name!r}: its data cannot be loaded: {reason}") from error
        if twice := loaded["tasks"].keys() & one["tasks"].keys():
            raise ValueError(f"task {min(twice)} is requested twice, by {name!r} and by one of {', '.join(wanted)}")
        for task in one["tasks"].values():
            if few_shot is not None:
                task.set_config(key="num_fewshot", value=few_shot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        for kind in loaded:
            loaded[kind] |= one[kind]
        parts[name] = [*one["groups"], *one["tasks"]]
    return loaded, parts


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics, their standard errors ("acc_stderr,none") if any, and "sample_len", the question count."""
    return {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float, np.number))}


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global generators, and restore their states afterwards."""
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
