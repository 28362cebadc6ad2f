"""Test that lm-eval has the tasks and metrics of our task groups."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fewbits.experiments.evaluation.tasks import TASK_GROUPS, Task

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
