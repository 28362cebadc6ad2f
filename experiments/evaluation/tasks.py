"""List the downstream tasks in MoR's and NVFP4's tables, and run lm-eval's tasks on one of fewbits' models.

Assumptions: if a paper gives no number of few-shot examples (`few_shot=None`), lm-eval's default is used. No paper
names the metric: it is accuracy normalised by length where lm-eval has this metric, as is usual. If lm-eval does not
have exactly the task that the paper names, `differs` says how the task that is run differs.

Metrics are deterministic. lm-eval seeds the global random generators; their states are restored afterwards, so a trial
that is evaluated during training continues unchanged. Tasks with local data (`dataset_path: json`) need no network.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fewbits.common.process import environment, extras
from fewbits.experiments.data.tokenizing import Tokenizer
from fewbits.experiments.evaluation.loss import Model, check_count

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

SEED = 1234  # lm-eval's default, for the few-shot examples and everything else that it seeds
BOOTSTRAPS = 1000  # number of resamples for the standard error of metrics without a formula for it


@dataclass(frozen=True)
class Task:
    """A row of a paper's table; its score is the mean of one metric over lm-eval tasks."""

    title: str  # the row's name in the paper
    names: tuple[str, ...]  # names of lm-eval's tasks
    metric: str  # lm-eval's key of the metric: METRIC,FILTER
    few_shot: int | None = None  # number of examples; None: not stated in the paper, lm-eval's default is assumed
    category: str = ""  # the paper's heading above several rows; a heading's score is the mean of its rows' scores
    differs: str = ""  # how lm-eval's task differs from the paper's; empty: not at all

    def score(self, results: Mapping[str, Mapping[str, float]]) -> float:
        """Return this row's score, between 0 and 1, from results: lm-eval task → metric → value."""
        return fmean(results[name][self.metric] for name in self.names)


ACC, ACC_NORM = "acc,none", "acc_norm,none"
LAST_NUMBER = "exact_match,flexible-extract"  # compares the last number in the answer, however it is phrased

# MGSM: the languages in the paper that introduced it. Global MMLU: the languages of lm-eval's set Global-MMLU-Lite.
MGSM_LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
GLOBAL_MMLU_LANGUAGES = ("ar", "bn", "de", "en", "es", "fr", "hi", "id", "it", "ja", "ko", "pt", "sw", "yo", "zh")

TASK_GROUPS: Mapping[str, tuple[Task, ...]] = {
    # MoR tables 2 to 4. The paper's text and figure 7 state the few-shot examples of MMLU, but of no other task.
    "mor": (
        Task("MMLU", ("mmlu",), ACC, few_shot=5),
        Task("WinoGrande", ("winogrande",), ACC),
        Task("PIQA", ("piqa",), ACC_NORM),
        Task("HellaSwag", ("hellaswag",), ACC_NORM),
        Task("Arc-Easy", ("arc_easy",), ACC_NORM),
        Task("Arc-Challenge", ("arc_challenge",), ACC_NORM),
        Task("OpenBookQA", ("openbookqa",), ACC_NORM),
        Task("SIQA", ("social_iqa",), ACC),
        Task("CommonSenseQA", ("commonsense_qa",), ACC),
    ),
    # NVFP4 table 2. It states only MMLU-Pro's number of few-shot examples.
    "nvfp4": (
        Task("MMLU", ("mmlu",), ACC, category="General"),
        Task("MMLU-Pro 5-shot", ("mmlu_pro",), "exact_match,custom-extract", few_shot=5, category="General"),
        Task(
            "AGIEval English CoT",
            ("agieval_en",),
            ACC,
            category="General",
            differs="the choices are scored at once; the paper lets the model reason first (CoT)",
        ),
        Task("GSM8k CoT", ("gsm8k_cot",), LAST_NUMBER, category="Math"),
        # Not lm-eval's minerva_math, in which the model reasons first: it needs antlr4 4.11, but OmegaConf needs 4.9.
        Task(
            "MATH",
            ("hendrycks_math",),
            "exact_match,none",
            category="Math",
            differs="the prompt asks for the answer alone, with no worked examples",
        ),
        Task(
            "MATH-500",  # only in Figure 3
            ("hendrycks_math500",),
            "exact_match,none",
            differs="the prompt asks for the answer alone, with no worked examples",
        ),
        Task(
            "Global MMLU",
            tuple(f"global_mmlu_{language}" for language in GLOBAL_MMLU_LANGUAGES),
            ACC,
            category="Multilingual",
            differs="Global-MMLU-Lite, all its languages; the paper says neither which set nor which languages",
        ),
        Task(
            "MGSM",
            tuple(f"mgsm_native_cot_{language}" for language in MGSM_LANGUAGES),
            LAST_NUMBER,
            category="Multilingual",
            differs="reasoning is asked for in the question's language; the paper does not say in which",
        ),
        Task("HumanEval+", ("humaneval_plus",), "pass@1,create_test", category="Code"),
        Task("MBPP+", ("mbpp_plus",), "pass_at_1,none", category="Code"),
        Task("ARC Challenge", ("arc_challenge",), ACC_NORM, category="Commonsense Understanding"),
        Task("HellaSwag", ("hellaswag",), ACC_NORM, category="Commonsense Understanding"),
        Task("OpenBookQA", ("openbookqa",), ACC_NORM, category="Commonsense Understanding"),
        Task("PIQA", ("piqa",), ACC_NORM, category="Commonsense Understanding"),
        Task("Winogrande", ("winogrande",), ACC, category="Commonsense Understanding"),
    ),
}


def shots(names: Sequence[str]) -> dict[str, int | None]:
    """Return the number of few-shot examples (None: lm-eval's default) by lm-eval task.

    Raise ValueError if two names use one task with different numbers of examples, because results are stored by task.
    """
    if not names:
        raise ValueError(f"no task is requested: valid tasks are {', '.join(TASK_GROUPS)} and lm-eval's tasks")
    wanted: dict[str, int | None] = {}
    for name in names:
        for task in TASK_GROUPS.get(name, (Task(name, (name,), ""),)):
            for each in task.names:
                if wanted.setdefault(each, task.few_shot) != task.few_shot:
                    counts = ("lm-eval's default" if n is None else n for n in (wanted[each], task.few_shot))
                    raise ValueError(
                        f"{', '.join(names)}: lm-eval's task {each} is requested with different numbers of few-shot "
                        f"examples ({', and '.join(map(str, counts))} by {name}), but a run stores one result for each "
                        "task: request the other number in a separate `fewbits evaluate`"
                    )
    return wanted


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
    """Return the metrics as requested name → lm-eval task or group → metric, such as "acc,none" → value.

    tasks: names of lm-eval's tasks or groups, of tasks in YAML files under `include_path`, or in TASK_GROUPS.
    length, batch, end: as for FewbitsLM. limit: the number of questions of each task; None: all.
    run_code: allow tasks that execute code which the model writes.
    """
    if limit is not None:
        check_count("limit", limit)
    wanted = shots(tasks)
    manager = _manager(wanted, include_path)
    _check(manager, wanted, run_code)
    from lm_eval import evaluate

    from fewbits.experiments.evaluation.language_model import FewbitsLM

    lm = FewbitsLM(model, tokenizer, length=length, batch=batch, end=end)
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
    results = {  # metrics, standard errors ("acc_stderr,none"), the number of questions ("sample_len")
        name: {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float, np.number))}
        for name, metrics in evaluated["results"].items()
    }
    return {
        task: {name: results[name] for each in shots([task]) for name in parts[each] if name in results}
        for task in tasks
    }


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None, run_code: bool = False) -> None:
    """Raise ValueError if `run_tasks` would refuse these tasks; called before training starts."""
    wanted = shots(tasks)
    _check(_manager(wanted, include_path), wanted, run_code)


def _manager(wanted: Mapping[str, int | None], include_path: str | Path | None) -> TaskManager:
    """Return lm-eval's index of tasks, including those under `include_path`. Raise ValueError for unknown tasks.

    lm-eval's own 14,000 tasks take 10 s to read, so they are not read if all wanted tasks are under `include_path`.
    """
    with extras():
        from lm_eval import tasks as lm_eval_tasks
    if include_path is not None:
        if not Path(include_path).is_dir():
            expected = "a folder of lm-eval YAML files is expected (in a trial's config evaluation.tasks_path)"
            raise ValueError(f"include_path={str(include_path)!r}: {expected}")
        local = lm_eval_tasks.TaskManager(include_path=include_path, include_defaults=False)
        if all(_is_complete(local, name) for name in wanted):
            return local
    manager: TaskManager = lm_eval_tasks.TaskManager(include_path=include_path)
    if unknown := [name for name in wanted if name not in manager.task_index]:
        near = get_close_matches(unknown[0], [*TASK_GROUPS, *manager.all_tasks])
        raise ValueError(
            f"unknown task {', '.join(map(repr, unknown))}: valid tasks are {', '.join(TASK_GROUPS)}, lm-eval's tasks "
            f"(lm-eval ls tasks), and YAML files under include_path={include_path or 'DIR'} (evaluation.tasks_path)"
            + (f"; did you mean {', '.join(near)}" if near else "")
        )
    return manager


def _check(manager: TaskManager, wanted: Mapping[str, int | None], run_code: bool) -> None:
    """Raise ValueError if two wanted names mean the same task, or if a task runs code although `run_code` is false.

    lm-eval itself would report these two errors only after it has loaded the data.
    """
    requested: dict[str, str] = {}  # task → the wanted name that means it
    for name in wanted:
        for task in dict.fromkeys(_members(manager, name)):
            if (other := requested.setdefault(task, name)) != name:
                raise ValueError(f"task {task} is requested twice, by {other!r} and by {name!r}: request it once")
    unsafe = [task for task in requested if _config(manager, task).get("unsafe_code")]
    if unsafe and not run_code:
        raise ValueError(
            f"{', '.join(unsafe)} run code that the model writes: use a sandbox, and allow it with --run-code, "
            "evaluation.run_code=true, or in Python run_code=True"
        )


def _is_complete(manager: TaskManager, name: str) -> bool:
    """Tell whether the index has the task or group `name` and all of a group's members."""
    members = _config(manager, name).get("task")
    return name in manager.task_index and (
        not isinstance(members, list) or all(isinstance(each, str) and _is_complete(manager, each) for each in members)
    )


def _members(manager: TaskManager, name: str) -> Iterator[str]:
    """Yield the name of a task or tag, or the names of the tasks in a group and in the groups inside it."""
    members = _config(manager, name).get("task")
    if not isinstance(members, list):
        yield name
        return
    for member in members:
        task = member.get("task") if isinstance(member, Mapping) else member
        if isinstance(task, str):
            yield from _members(manager, task)


def _config(manager: TaskManager, name: str) -> Mapping[str, Any]:
    entry = manager.task_index.get(name)
    return (entry and entry.cfg) or {}


def _load(
    manager: TaskManager, wanted: Mapping[str, int | None]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Load the wanted tasks, with their data, and set their numbers of few-shot examples.

    Return them as lm-eval's `evaluate` expects them, and, for each wanted name, the names of its groups and tasks.
    """
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    parts: dict[str, list[str]] = {}
    for name, few_shot in wanted.items():
        try:
            one: dict[str, Any] = manager.load([name])
        except OSError as error:  # of the file system, or of `datasets` without a network
            raise ValueError(f"task {name!r}: its data cannot be loaded: {' '.join(str(error).split())}") from error
        for task in one["tasks"].values():
            if few_shot is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=few_shot or 0)
            task.set_fewshot_seed(seed=SEED)
        for kind in loaded:
            loaded[kind] |= one[kind]
        parts[name] = [*one["groups"], *one["tasks"]]
    return loaded, parts


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
