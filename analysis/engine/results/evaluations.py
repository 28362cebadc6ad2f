"""Read evaluations of checkpoints: scores on the papers' tasks, losses of single documents, and probes of recipes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from fewbits.analysis.engine.results.frames import CURVE, SCORES, Results
from fewbits.analysis.engine.results.rows import LABELS
from fewbits.analysis.engine.statistics import Error
from fewbits.experiments.evaluation.tasks import TASK_GROUPS, Task
from fewbits.experiments.probes.errors import WHOLE
from fewbits.experiments.probes.probe_trial import TABLE

RECENT = 5  # the checkpoints among which a "best of recent checkpoints" is chosen; the paper does not say how many
DOCUMENTS = "evaluation.parquet"  # a run folder's losses by document
VALIDATION = "validation"  # the value of the column `text` for the documents that validation_loss is measured on
PROBE_METRIC = "probe:"  # the start of the names of probes' metrics


# -------------------------------------------------------------------------------- scores on tasks


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
    tasks = paper_tasks(title)
    # A subtask's weight is its share of the heading.
    weights = {f"tasks.{n}.{task.metric}": 1 / len(task.names) / len(tasks) for task in tasks for n in task.names}
    frame = results.table_of(SCORES)
    rows = frame[frame["name"].isin(weights)] if len(frame) else frame
    if rows.empty:
        return pd.DataFrame(columns=CURVE)
    rows = rows.assign(share=rows["value"].astype(float) * rows["name"].map(weights).astype(float))
    groups = rows.groupby([*LABELS, "state", "step"], dropna=False, sort=False)["share"]
    rows = groups.agg(["sum", "count"]).reset_index().rename(columns={"sum": "value"})
    rows = rows[rows["count"] == len(weights)]
    tokens = [_tokens(results, str(trial), int(step)) for trial, step in zip(rows["id"], rows["step"], strict=True)]
    return rows.assign(tokens=tokens)[CURVE].reset_index(drop=True)


def _tokens(results: Results, trial: str, step: int) -> int:
    """Return the number of tokens that a trial has read after this step, with those of its trunks."""
    planned = results.plan.trials[trial]
    training = planned.trial.training
    return planned.earlier_tokens + step * training.batch * training.length


def best_of_recent(scores: pd.DataFrame) -> dict[str, float]:
    """Return {trial id: greatest score of its last RECENT checkpoints}. scores: with the columns id, step and value."""
    recent = scores.drop_duplicates(["id", "step"]).sort_values("step").groupby("id").tail(RECENT)
    return {str(trial): float(best) for trial, best in recent.groupby("id")["value"].max().items()}


# -------------------------------------------------------------------------------- losses of documents


def documents(results: Results, column: str) -> pd.DataFrame:
    """Return the validation loss in this column of DOCUMENTS by document and its number of tokens, and by trial id."""
    frame = results.table_of(DOCUMENTS)
    if column not in frame:
        return pd.DataFrame()
    rows = frame[frame["text"] == VALIDATION].drop_duplicates(["id", "document"])
    return rows.pivot(index=["document", "tokens"], columns="id", values=column)


def document_error(losses: pd.DataFrame, pairs: Iterable[tuple[str, str]], *, relative: bool) -> Error | None:
    """Return the standard error of the mean difference, arm minus baseline, that comes from the choice of documents.

    All seeds share the documents, so more seeds do not reduce this error, and each document's difference is first
    averaged over the seeds. The error is that of a ratio estimator (sum of losses / sum of tokens), with documents as
    clusters.
    """
    evaluated = [(ours, base) for ours, base in pairs if {ours, base} <= set(losses.columns)]
    if not evaluated:
        return None
    changes = pd.concat([losses[ours] - losses[base] for ours, base in evaluated], axis=1).mean(axis=1).dropna()
    levels = pd.concat([losses[base] for _, base in evaluated], axis=1).mean(axis=1).loc[changes.index]
    if len(changes) < 2:
        return None
    weights = changes.index.get_level_values("tokens").to_numpy(float)
    level = float(np.average(levels, weights=weights)) if relative else 1.0
    mean = float(np.average(changes, weights=weights))
    # The influence of each document on the weighted mean difference or, if relative, on this difference / the
    # baseline's mean loss (`level`).
    influence = weights * ((changes - mean) - (mean / level) * (levels - level) if relative else changes - mean)
    variance = len(influence) * float(influence.var(ddof=1))
    return Error(math.sqrt(variance) / (float(weights.sum()) * level), len(influence) - 1)


# -------------------------------------------------------------------------------- probes


def probe_numbers(results: Results, metric: str) -> dict[str, float]:
    """Return {trial id: mean over batches} of a metric `probe:VARIANT:MEASURE` or, for a ratio, `probe:A/B:MEASURE`.

    A variant is a recipe of which only some operands are quantized; a measure is a column of the probe's table:
    `probe:only fprop.x:increase` is the increase of the loss if only fprop.x is quantized, and
    `probe:only fprop/only dgrad:error` the ratio of the errors of two variants. docs/columns.md lists both.
    Trials without the variant, or whose divisor is missing or 0, have no entry.
    """
    _, variant, measure = metric.split(":")
    rows = whole_model_rows(results)
    if rows.empty or measure not in rows:
        return {}
    above, *below = (_means(rows, name, measure) for name in variant.split("/"))
    if not below:
        return above
    return {trial: value / below[0][trial] for trial, value in above.items() if below[0].get(trial)}


def _means(rows: pd.DataFrame, variant: str, measure: str) -> dict[str, float]:
    means = rows[rows["variant"] == variant].groupby("id")[measure].mean().dropna()
    return {str(trial): float(value) for trial, value in means.items()}


def whole_model_rows(results: Results) -> pd.DataFrame:
    """Return those rows of all probes' tables that describe the whole model (loss and full gradient), not one layer."""
    table = results.table_of(TABLE)
    return table if table.empty else table[table["layer"] == WHOLE]
