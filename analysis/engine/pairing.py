"""Pairing: differences of an arm and its baseline, seed by seed, and an arm's own numbers.

A pair is two finished trials of a seed that one kind of machine computed. What is missing, diverged or not alike is
counted or named; it is never left out quietly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from fewbits.analysis.engine.alike import why_not_compared
from fewbits.analysis.engine.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.rows import Row, place_name, treatment
from fewbits.analysis.engine.statistics import differences
from fewbits.common.from_dict import one_of
from fewbits.sweeps.running.store import OVER, State

Metric = str | Mapping[str, float]  # a number of result.json, `ood_cloze.accuracy` say; or one of each trial's, by id
Between = Callable[[str, str], float | None]  # of the arm's trial and the baseline's, by id
Where = Mapping[str, str]  # values of axes


def paired(
    results: Results,
    metric: Metric | Between,
    arm: str,
    baseline: str,
    where: Where | None = None,
    *,
    baseline_where: Where | None = None,
    relative: bool = True,
) -> Differences | NoData:
    """Return arm minus baseline, seed by seed; a baseline that leaves axes out is shared by all of their values.

    metric: a function takes both trials, and its value is the difference. where: values of axes, as many as it takes to
    leave one combination, since the seeds alone replicate. baseline_where: the baseline's, where it stands elsewhere.
    """
    rows = arm_rows(results, arm, where)
    others = arm_rows(results, baseline, baseline_where, shared=baseline_where is None)
    found, used, notes = [], [], []
    ours_diverged = baseline_diverged = 0
    for row in rows:
        fitting = [o for o in others if o["seed"] == row["seed"]]
        if baseline_where is None:
            fitting = [o for o in fitting if set(o["axes"]) <= set(row["axes"])]
        if len(fitting) != 1:
            notes.append(f"{place_name(row)}: {len(fitting) or 'no'} places of {baseline} to pair it with")
            continue
        (other,) = fitting
        used += [row["id"], other["id"]]
        names = (treatment(row["arm"], row["axes"]), treatment(other["arm"], other["axes"]))
        if unlike := why_not_compared(row, names, other, results.usual_kind):
            notes.append(unlike)
            continue
        diverged = [one["state"] == State.DIVERGED for one in (row, other)]
        if all(diverged):
            notes.append(f"{place_name(row)}: both diverged")
        elif any(diverged) and all(one["state"] in OVER for one in (row, other)):
            ours_diverged += diverged[0]
            baseline_diverged += diverged[1]
        elif unfinished := [_unfinished(one) for one in (row, other) if one["state"] != State.DONE]:
            notes += unfinished
        elif isinstance(one := _difference(results, row, other, metric, relative), str):
            notes.append(one)
        else:
            found.append(one)
    trials, told = tuple(dict.fromkeys(used)), tuple(dict.fromkeys(notes))
    if not found and not ours_diverged and not baseline_diverged:
        return NoData("; ".join(notes), trials)
    return Differences(
        tuple(found), relative, trials, told, diverged=ours_diverged, baseline_diverged=baseline_diverged
    )


def combined(
    results: Results,
    arms: Sequence[tuple[str, str]],
    combine: Callable[..., float],
    metric: Metric,
    *,
    relative: bool = True,
) -> Differences | NoData | NotPlanned:
    """Return a number of several trials of a seed, such as the interaction of two choices, seed by seed.

    arms: sweep and name of each; combine: takes their numbers in that order. A seed counts where all of its trials are
    done and one kind of machine computed them; for any other seed a reason is named.
    """
    by_arm = [{row["seed"]: row for row in results.rows if (row["sweep"], row["arm"]) == place} for place in arms]
    if not all(by_arm):
        return NotPlanned(f"not run at this scale ({results.scale_name})")
    found, notes = [], []
    for seed in sorted(set.intersection(*map(set, by_arm))):
        rows = [one[seed] for one in by_arm]
        numbers = [number(results, row, metric) for row in rows]
        reasons = [one for one in numbers if isinstance(one, str)] or _unlike(results, rows)
        if reasons:
            notes += reasons
        else:
            found.append(combine(*numbers))
    trials, told = (
        tuple(dict.fromkeys(row["id"] for one in by_arm for row in one.values())),
        tuple(dict.fromkeys(notes)),
    )
    return Differences(tuple(found), relative, trials, told) if found else NoData("; ".join(told), trials)


def _unlike(results: Results, rows: Sequence[Row]) -> list[str]:
    """Return why the first of these trials is not compared with each of the others."""
    first, *others = rows
    names = [treatment(row["arm"], row["axes"]) for row in rows]
    pairs = zip(others, names[1:], strict=True)
    reasons = (why_not_compared(first, (names[0], name), other, results.usual_kind) for other, name in pairs)
    return [reason for reason in reasons if reason]


def sample(results: Results, metric: Metric, arm: str, where: Where | None = None) -> Differences | NoData:
    """Return the arm's own numbers, one of each seed: for shares and levels, which no baseline is taken from."""
    rows = arm_rows(results, arm, where)
    values = [number(results, row, metric) for row in rows]
    notes = tuple(value for value in values if isinstance(value, str))
    numbers = tuple(value for value in values if not isinstance(value, str))
    ids = tuple(row["id"] for row in rows)
    return Differences(numbers, False, ids, notes) if numbers else NoData("; ".join(notes), ids)


def arm_rows(results: Results, arm: str, where: Where | None = None, *, shared: bool = False) -> list[Row]:
    """Return the rows of an arm, each trial once. shared: of several combinations of axes, as a baseline may have."""
    one_of("arm", arm, dict.fromkeys(member.cell.arm for member in results.members))
    chosen = set((where or {}).items())
    rows = {row["id"]: row for row in results.rows if row["arm"] == arm and chosen <= set(row["axes"])}
    combinations = list(dict.fromkeys(row["axes"] for row in rows.values()))
    if len(combinations) == 1 or shared:
        return list(rows.values())
    named = " ".join(f"{axis}={value}" for axis, value in (where or {}).items()) or "nothing"
    there = "; ".join(" ".join(f"{a}={v}" for a, v in c) for c in combinations)
    raise ValueError(f"arm {arm}, of its axes {named} chosen: {there or 'no place'} is left, and one is expected")


def number(results: Results, row: Row, metric: Metric) -> float | str:
    """Return the number of a finished trial, or why there is none."""
    if row["state"] != State.DONE:
        return _unfinished(row)
    if isinstance(metric, str):
        one_of("metric", metric, results.metrics())
        value = row[metric]
    else:
        value = metric.get(row["id"])
    return f"{place_name(row)}: no number" if value is None or pd.isna(value) else float(value)


def _difference(results: Results, row: Row, other: Row, metric: Metric | Between, relative: bool) -> float | str:
    if callable(metric):
        found = metric(row["id"], other["id"])
        return f"{place_name(row)}: no number" if found is None else found
    ours, theirs = number(results, row, metric), number(results, other, metric)
    if isinstance(ours, str) or isinstance(theirs, str):
        return "; ".join(value for value in (ours, theirs) if isinstance(value, str))
    return float(differences([ours], [theirs], relative=relative)[0])


def _unfinished(row: Row) -> str:
    why = row["state"] if row["state"] in OVER else row["note"] or row["state"]
    return f"{place_name(row)}: {why}"
