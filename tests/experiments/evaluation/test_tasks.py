"""Test that our task groups have the rows of the papers' tables, and that lm-eval has their tasks and metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fewbits.experiments.evaluation.tasks import TASK_GROUPS, Task, shots
from tests.messages import naming

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

EVERY = [(group, task) for group, tasks in TASK_GROUPS.items() for task in tasks]
FOLDERS = (  # the folders of our tasks: reading all of lm-eval's 14,000 tasks takes 10 seconds
    *("agieval", "arc", "commonsense_qa", "global_mmlu/default", "gsm8k", "hellaswag", "hendrycks_math", "humaneval"),
    *("mbpp", "mgsm", "mmlu/default", "mmlu_pro", "openbookqa", "piqa", "siqa", "winogrande"),
)


@pytest.fixture(scope="module")
def manager() -> "TaskManager":
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_path=[root / folder for folder in FOLDERS], include_defaults=False)


def test_the_groups_hold_the_rows_of_the_papers_tables() -> None:
    titles = {group: ", ".join(task.title for task in tasks) for group, tasks in TASK_GROUPS.items()}
    assert titles == {
        "mor": "MMLU, WinoGrande, PIQA, HellaSwag, Arc-Easy, Arc-Challenge, OpenBookQA, SIQA, CommonSenseQA",
        "nvfp4": "MMLU, MMLU-Pro 5-shot, AGIEval English CoT, GSM8k CoT, MATH, MATH-500, Global MMLU, MGSM, "
        "HumanEval+, MBPP+, ARC Challenge, HellaSwag, OpenBookQA, PIQA, Winogrande",
    }
    categories = [task.category for task in TASK_GROUPS["nvfp4"]]
    assert {category: categories.count(category) for category in dict.fromkeys(categories)} == {
        "General": 3,
        "Math": 2,
        "": 1,
        "Multilingual": 2,
        "Code": 2,
        "Commonsense Understanding": 5,
    }


def test_numbers_of_examples_are_those_that_the_papers_state() -> None:
    stated = {(group, task.title): task.few_shot for group, task in EVERY if task.few_shot is not None}
    assert stated == {("mor", "MMLU"): 5, ("nvfp4", "MMLU-Pro 5-shot"): 5}


def leaves(manager: "TaskManager", name: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of the lm-eval task `name`, or of all tasks in the group or tag `name`."""
    entry = manager.task_index[name]
    held = entry.tags if entry.cfg is None else entry.cfg["task"]
    if isinstance(held, str):
        yield entry.cfg or {}
    else:
        for each in held:
            yield from leaves(manager, each)


@pytest.mark.parametrize(("group", "task"), EVERY, ids=lambda value: getattr(value, "title", value))
def test_the_installed_lm_eval_has_every_task_and_its_metric(manager: "TaskManager", group: str, task: Task) -> None:
    metric, filtered = task.metric.split(",")
    if metric == "pass@1":
        metric = "pass_at_k"  # the name of lm-eval's function; its values are called pass@1, pass@2 …
    for name in task.names:
        top = manager.task_index[name].cfg
        assert top is not None, f"{name} is a tag: lm-eval pools no metric for it"
        if isinstance(top["task"], list):
            assert metric in [pooled["metric"] for pooled in top["aggregate_metric_list"]]
        for leaf in leaves(manager, name):
            metrics = [
                each["metric"].rpartition(".")[2] for each in leaf["metric_list"]
            ]  # a metric that is a function has its module's path before its name
            assert metric in metrics, f"{leaf['task']} has {metrics}"
            filters = [each["name"] for each in leaf.get("filter_list", [{"name": "none"}])]
            assert filtered in filters, f"{leaf['task']} has {filters}"


def test_a_row_is_the_mean_over_its_tasks() -> None:
    task = Task("Both", ("a", "b"), "acc,none")
    assert task.score({"a": {"acc,none": 0.5}, "b": {"acc,none": 1.0, "acc_norm,none": 0.0}, "c": {}}) == 0.75


def test_names_are_groups_or_lm_evals_own() -> None:
    assert shots(["mor"]) == {name: 5 if name == "mmlu" else None for task in TASK_GROUPS["mor"] for name in task.names}
    assert shots(["piqa", "boolq"]) == {"piqa": None, "boolq": None}
    assert len(shots(["nvfp4"])) == 13 + 15 + 11
    with pytest.raises(ValueError, match=naming("mor", "nvfp4", "lm-eval")):
        shots([])


def test_one_task_with_two_numbers_of_examples_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("mor", "nvfp4", "mmlu", 5)):
        shots(["mor", "nvfp4"])
