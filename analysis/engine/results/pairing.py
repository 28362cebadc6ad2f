"""Compute the differences between an arm and its baseline, one for each seed (`paired`), or get an arm's own numbers.

A pair consists of two finished trials with the same seed that were computed in the same environment (alike.py). Pairs
in which only one trial diverged are counted, without a difference. For other missing pairs, a note has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from fewbits.analysis.engine.results.data import Differences, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import ANYWHERE, Where
from fewbits.analysis.engine.results.rows import Row, place_name, why_not_compared
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.store import OVER, State

Metric = str | Mapping[str, float]  # the name of a number in result.json (`tasks.piqa.acc,none`), or {trial id: number}
Between = Callable[[str, str], float | None]  # (id of the arm's trial, id of the baseline's trial) → their difference


class AlsoDiverged(dict[str, float]):
    """{trial id: number} of a metric that diverged trials have, too; otherwise only finished trials have numbers."""


def paired(
    results: Results,
    metric: Metric | Between,
    arm: str,
    baseline: str,
    where: Where = ANYWHERE,
    *,
    baseline_where: Where | None = None,
    relative: bool = True,
) -> Differences | NoData:
    """Return the differences arm minus baseline, one for each seed; NoData if there is nothing to test.

    metric: the name of a number, {trial id: number}, or a function of two trial ids that returns their difference.
    where: axis values of the arm. They have to leave only one trial for each seed, since only seeds are replicates.
    baseline_where: axis values of the baseline. If it is None, each trial is paired with the baseline's trial that has
        the same values of all axes that the baseline has.
    relative: divide each difference by the absolute value of the baseline's number.
    """
    rows = arm_rows(results, arm, where)
    others = arm_rows(results, baseline, baseline_where or ANYWHERE, shared=baseline_where is None)
    values, used, notes = [], [], []
    ours_diverged = baseline_diverged = 0
    for row in rows:
        matches = [other for other in others if other["seed"] == row["seed"]]
        if baseline_where is None:
            matches = [other for other in matches if set(other["axes"]) <= set(row["axes"])]
        if len(matches) != 1:
            count = len(matches) or "no"
            notes.append(f"{place_name(row)}: {count} trials of {baseline} match it; a pair needs exactly one")
            continue
        (other,) = matches
        used += [row["id"], other["id"]]
        if unlike := why_not_compared(row, other, results.usual_kind):
            notes.append(unlike)
            continue
        diverged = [trial["state"] == State.DIVERGED for trial in (row, other)]
        if all(diverged):
            notes.append(f"{place_name(row)}: both trials of the pair diverged")
        elif any(diverged) and all(trial["state"] in OVER for trial in (row, other)):
            ours_diverged += diverged[0]
            baseline_diverged += diverged[1]
        elif unfinished := [_unfinished(trial) for trial in (row, other) if trial["state"] != State.DONE]:
            notes += unfinished
        elif isinstance(difference := _difference(results, row, other, metric, relative), str):
            notes.append(difference)
        else:
            values.append(difference)
    trials = tuple(dict.fromkeys(used))
    if not values and not ours_diverged and not baseline_diverged:
        return NoData("; ".join(notes), trials)
    return Differences(tuple(values), relative, trials, tuple(dict.fromkeys(notes)), ours_diverged, baseline_diverged)


def sample(results: Results, metric: Metric, arm: str, where: Where = ANYWHERE) -> Differences | NoData:
    """Return the arm's own numbers, one for each seed, without a baseline; NoData if no trial has a number."""
    rows = arm_rows(results, arm, where)
    values = [number(results, row, metric) for row in rows]
    notes = tuple(value for value in values if isinstance(value, str))
    numbers = tuple(value for value in values if not isinstance(value, str))
    ids = tuple(row["id"] for row in rows)
    return Differences(numbers, False, ids, notes) if numbers else NoData("; ".join(notes), ids)


def line_of(results: Results, trial: str, metric: str = "validation_loss") -> list[tuple[float, float]]:
    """Return the points (tokens, value) of a trial's curve, with those of its trunks before the trial branched."""
    points = results.remembered(f"points {metric}", lambda: _points(results.curves(metric)))
    own, parent = points.get(trial, []), results.plan.trials[trial].parent
    first = own[0][0] if own else 0.0
    return [*(point for point in (line_of(results, parent, metric) if parent else []) if point[0] < first), *own]


def _points(curves: pd.DataFrame) -> dict[str, list[tuple[float, float]]]:
    curves = curves.astype({"tokens": float, "value": float})
    groups = curves.groupby("id")
    return {str(name): sorted(set(zip(one["tokens"], one["value"], strict=True))) for name, one in groups}


def arm_rows(results: Results, arm: str, where: Where = ANYWHERE, *, shared: bool = False) -> list[Row]:
    """Return the rows of `results.trials` for an arm with these axis values; a trial in several places counts once.

    Raise ValueError if the rows do not have exactly one combination of axis values. shared: return the rows of any
    number of combinations. It is set for baselines, whose trials are later matched with the arm's by axis values.
    """
    one_of("arm", arm, dict.fromkeys(member.cell.arm for member in results.members))
    chosen = set(where.items())
    rows = {row["id"]: row for row in results.rows if row["arm"] == arm and chosen <= set(row["axes"])}
    combinations = dict.fromkeys(row["axes"] for row in rows.values())
    if len(combinations) == 1 or shared:
        return list(rows.values())
    given, *left = (" ".join(f"{axis}={value}" for axis, value in axes) for axes in (where.items(), *combinations))
    raise ValueError(
        f"arm {arm} with {given or 'no axis values'}: exactly one of the arm's combinations of axis values must match, "
        f"but these match: {'; '.join(left) or 'none'}; choose axis values that select one"
    )


def number(results: Results, row: Row, metric: Metric) -> float | str:
    """Return the metric's number for the trial in this row or, as text, the reason why it has none."""
    if row["state"] != State.DONE and not (isinstance(metric, AlsoDiverged) and row["state"] in OVER):
        return _unfinished(row)
    if isinstance(metric, str):
        one_of("metric", metric, results.metrics())
        value = row[metric]
    else:
        value = metric.get(row["id"])
    return f"{place_name(row)}: no number" if value is None or pd.isna(value) else float(value)


def _difference(results: Results, row: Row, other: Row, metric: Metric | Between, relative: bool) -> float | str:
    if callable(metric):
        difference = metric(row["id"], other["id"])
        return f"{place_name(row)}: no number" if difference is None else difference
    ours, theirs = number(results, row, metric), number(results, other, metric)
    if isinstance(ours, str) or isinstance(theirs, str):
        return "; ".join(value for value in (ours, theirs) if isinstance(value, str))
    if relative and not theirs:
        return f"{place_name(other)}: the number is 0, so there is no relative difference"
    return (ours - theirs) / abs(theirs) if relative else ours - theirs


def _unfinished(row: Row) -> str:
    why = row["state"] if row["state"] in OVER else row["note"] or row["state"]
    return f"{place_name(row)}: {why}"
