"""Read the scores on the papers' tasks, such as MMLU, that evaluations of checkpoints have stored in run folders."""

from __future__ import annotations

import re

import pandas as pd

from fewbits.analysis.engine.results.frames import SCORES, Results
from fewbits.analysis.engine.results.rows import LABELS
from fewbits.experiments.evaluation.tasks import TASK_GROUPS, Task

RECENT = 5  # the checkpoints among which a "best of recent checkpoints" is chosen; the paper does not say how many


def letters(title: str) -> str:
    """Return a title's lower-case letters and digits: papers spell one task in several ways."""
    return re.sub(r"[^a-z0-9]", "", title.lower())


def paper_tasks(title: str) -> tuple[Task, ...]:
    """Return the task with this title in a paper's table, or the tasks below a heading; () if lm-eval has none.

    NVFP4's table 2 has the heading "Math" and the task "MATH", so the spelling decides first.
    """
    tasks = [task for group in TASK_GROUPS.values() for task in group]
    below = {task.title: task for task in tasks if task.category.startswith(title)}
    alike = [task for task in tasks if letters(task.title) == letters(title)]
    exact = [task for task in tasks if task.title == title]
    return tuple(exact[:1] or below.values() or alike[:1])


def scores_over_training(results: Results, title: str) -> pd.DataFrame:
    """Return a task's score by checkpoint: a row for each place and step, with the columns of `Results.curves`.

    A score is a share: the mean over the task's subtasks, or over the tasks below a heading. Checkpoints without all of
    them have no row.
    """
    tasks, columns = paper_tasks(title), [*LABELS, "state", "step", "tokens", "value"]
    frame = results.table_of(SCORES)
    # A subtask's weight is its share of the heading.
    weights = {f"tasks.{n}.{task.metric}": 1 / len(task.names) / len(tasks) for task in tasks for n in task.names}
    rows = frame[frame["name"].isin(weights)] if len(frame) else frame
    if rows.empty:
        return pd.DataFrame(columns=columns)
    rows = rows.assign(share=rows["value"].astype(float) * rows["name"].map(weights).astype(float))
    groups = rows.groupby([*LABELS, "state", "step"], dropna=False, sort=False)["share"]
    rows = groups.agg(["sum", "count"]).reset_index().rename(columns={"sum": "value"})
    rows = rows[rows["count"] == len(weights)]
    tokens = [_tokens(results, str(trial), int(step)) for trial, step in zip(rows["id"], rows["step"], strict=True)]
    return rows.assign(tokens=tokens)[columns].reset_index(drop=True)


def best_of_recent(results: Results, title: str) -> dict[str, float]:
    """Return {trial id: the greatest score of the last RECENT checkpoints that have one}."""
    frame = scores_over_training(results, title).drop_duplicates(["id", "step"]).sort_values("step")
    return {str(trial): float(rows["value"].tail(RECENT).max()) for trial, rows in frame.groupby("id")}


def _tokens(results: Results, trial: str, step: int) -> int:
    """Return the number of tokens that a trial has read after this step, with those of its trunks."""
    planned = results.plan.trials[trial]
    training, parent = planned.trial.training, planned.parent
    begun = 0
    if parent is not None:
        of_parent = results.plan.trials[parent].trial.training.steps
        begun = _tokens(results, parent, planned.trial.branch.step or of_parent)
    return begun + step * training.batch * training.length
