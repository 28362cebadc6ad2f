"""Run lm-eval tasks on one of fewbits' models and return their metrics.

The metrics are deterministic. lm-eval seeds the global random generators; their states are restored afterwards, so a
trial that is evaluated during training continues unchanged. Tasks with local data (`dataset_path: json`) need no
network.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits.common.process import environment
from fewbits.experiments.evaluation.loss import Model, Tokenizer
from fewbits.experiments.evaluation.tasks import TASK_GROUPS, shots

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

SEED = 1234  # lm-eval's default, for the few-shot examples and everything else that it seeds
BOOTSTRAPS = 1000  # number of resamples for the standard error of metrics without a formula for it


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
    """Return the metrics as requested name → lm-eval task or group → metric → value.

    A requested group has an entry for each of its tasks and, if lm-eval computes metrics of the whole group, one for
    the group. The keys of metrics are lm-eval's, such as "acc,none".

    tasks: names of lm-eval's tasks or groups, of tasks in YAML files under `include_path`, or in `tasks.TASK_GROUPS`.
    length: the number of tokens that the model reads at most. batch: the number of inputs per forward pass.
    end: the token between documents, which also ends generated texts; None: there is no such token.
    limit: the number of questions of each task; None: all.
    run_code: allow tasks that execute code which the model writes.
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"limit={limit!r}: an integer of 1 or more, or None for all questions, is expected")
    wanted = shots(tasks)
    _require_lm_eval()
    from lm_eval import evaluate

    from fewbits.experiments.evaluation.language_model import FewbitsLM

    lm = FewbitsLM(model, tokenizer, length=length, batch=batch, end=end)
    manager = _manager(wanted, include_path)
    _check(manager, wanted, run_code)
    # Without DISABLE_MULTIPROC lm-eval would fork this process, which is unsafe because it has threads.
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
    """Raise ValueError if `run_tasks` would refuse these tasks; called before training starts."""
    wanted = shots(tasks)
    _require_lm_eval()
    _check(_manager(wanted, include_path), wanted, run_code)


def _require_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name != "lm_eval":
            raise
        raise ValueError("downstream tasks need lm-eval: pip install 'fewbits[eval]'") from None


def _manager(wanted: Mapping[str, int | None], include_path: str | Path | None) -> "TaskManager":
    """Return lm-eval's index of tasks, including those under `include_path`. Raise ValueError for unknown tasks.

    lm-eval's own 14,000 tasks take 10 s to read, so they are not read if all wanted tasks are under `include_path`.
    wanted: tasks and groups, with their numbers of few-shot examples (None: lm-eval's default).
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(
                f"include_path={str(include_path)!r} (in a trial's config evaluation.tasks_path): a folder of lm-eval "
                "YAML files is expected"
            )
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(_complete(local, name) for name in wanted):
            return local
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in wanted if name not in manager.task_index]:
        near = get_close_matches(unknown[0], [*TASK_GROUPS, *manager.all_tasks])
        raise ValueError(
            f"unknown task {', '.join(map(repr, unknown))}: valid tasks are {', '.join(TASK_GROUPS)}, lm-eval's tasks "
            "(listed by lm-eval ls tasks), and the tasks in a folder of YAML files, named by "
            f"include_path={include_path or 'DIR'} (in a trial's config evaluation.tasks_path)"
            + (f"; did you mean {', '.join(near)}" if near else "")
        )
    return manager


def _complete(manager: "TaskManager", name: str) -> bool:
    """Tell whether the task or group `name` is in the index, and, for a group, all of its members, too."""
    if name not in manager.task_index:
        return False
    members = (manager.task_index[name].cfg or {}).get("task")
    return not isinstance(members, list) or all(isinstance(name, str) and _complete(manager, name) for name in members)


def _check(manager: "TaskManager", wanted: Mapping[str, int | None], run_code: bool) -> None:
    """Raise ValueError if two wanted names mean the same task, or if a task runs code although `run_code` is false.

    lm-eval itself would report these two errors only after it has loaded the data.
    """
    requested: dict[str, str] = {}  # task -> the wanted name that means it
    for name in wanted:
        for task in dict.fromkeys(_members(manager, name)):
            _check_once(task, name, requested)
    unsafe = [task for task in requested if _config(manager, task).get("unsafe_code")]
    if unsafe and not run_code:
        raise ValueError(
            f"{', '.join(unsafe)} run code that the model writes: use a sandbox, and allow it with the option "
            "--run-code, in a trial's config with evaluation.run_code=true, or in Python with run_code=True"
        )


def _check_once(task: str, name: str, requested: dict[str, str]) -> None:
    if task in requested:
        raise ValueError(f"task {task} is requested twice, by {requested[task]!r} and by {name!r}: request it once")
    requested[task] = name


def _members(manager: "TaskManager", name: str) -> Iterator[str]:
    """Yield the name of a task, or the names of the tasks in a group and in the groups inside it.

    For a tag of lm-eval, which stands for several tasks, yield the tag's name: the index does not list its tasks.
    """
    members = _config(manager, name).get("task")
    if not isinstance(members, list):
        yield name
        return
    for member in members:
        task = member.get("task") if isinstance(member, Mapping) else member
        if isinstance(task, str):
            yield from _members(manager, task)


def _config(manager: "TaskManager", name: str) -> Mapping[str, Any]:
    entry = manager.task_index.get(name)
    return (entry and entry.cfg) or {}


def _load(
    manager: "TaskManager", wanted: Mapping[str, int | None]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Load the wanted tasks, with their data, and set their numbers of few-shot examples.

    Return them as lm-eval's `evaluate` expects them, and, for each wanted name, the names of its groups and tasks.
    """
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    parts: dict[str, list[str]] = {}
    requested: dict[str, str] = {}
    for name, few_shot in wanted.items():
        try:
            one: dict[str, Any] = manager.load([name])
        except OSError as error:  # of the file system, or of `datasets` without a network
            reason = " ".join(str(error).split())
            raise ValueError(f"task {name!r}: its data cannot be loaded: {reason}") from error
        for task in one["tasks"]:
            _check_once(task, name, requested)
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
    """Return the entries that are numbers: metrics, standard errors ("acc_stderr,none"), number of questions.

    The number of questions has the key "sample_len".
    """
    return {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float, np.number))}


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the random generators of Python, numpy and torch for the `with` block; restore their states afterwards."""
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
