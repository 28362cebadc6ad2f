"""Figures 2, 4 and 7 to 14: curves of the arms, each figure a row of `looks.FIGURES`.

The paper's own curves are in its plots alone and not known to us; what it prints of them is marked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fewbits.analysis import trajectories
from fewbits.analysis.curves import Row, training
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.nvfp4.looks import FIGURES, Curves, Group, chosen, noise, shown
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture

SIGNS = (
    "Changes here are positive where the loss is higher; the paper's axes have (baseline − experiment) / baseline, the "
    "other sign. Its curves are in its plots alone and not known to us."
)


def curves(of: Curves, results: Results) -> Picture:
    """Of what is run; that some is not is said."""
    found = rows(of.groups, results)
    if not found:
        return NotRun(results.scale_name)
    picture = training(found)
    if not isinstance(picture, FigureResult):
        return picture
    return replace(picture, notes=(*picture.notes, *of.notes, *left_out(of.groups, results), SIGNS))


def rows(groups: tuple[Group, ...], results: Results) -> list[Row]:
    """Of the groups that are run, one for each metric."""
    found = []
    for group in groups:
        part = chosen(results, group.sweep)
        if isinstance(part, Results):
            of, marks = shown(group, groups), switches(part, group.arms)
            again = noise(results, group.sweep)
            found += [Row(part, of, metric, again, group.name, marks) for metric in group.metrics]
    return found


def left_out(groups: tuple[Group, ...], results: Results) -> tuple[str, ...]:
    """The groups that are not run, in words."""
    missing = [group.name or group.sweep for group in groups if isinstance(chosen(results, group.sweep), NotRun)]
    return (f"Not run at this scale: {', '.join(dict.fromkeys(missing))}.",) if missing else ()


def switches(part: Results, arms: tuple[str, ...]) -> tuple[float, ...]:
    """Tokens after which the recipes of some of these arms switch."""
    found: set[float] = set()
    frame = trajectories.curves(part, "loss")
    for trial, steps in frame[frame["arm"].isin(arms)].groupby("id"):
        of = part.plan.trials[str(trial)].trial
        before = steps[steps["step"] < of.recipe.switch.at * of.training.steps]
        if of.recipe.switches and len(before) < len(steps):
            found.add(float(before["tokens"].max()))
    return tuple(sorted(found))


for _one in FIGURES:
    figure("nvfp4", _one.id)(partial(curves, _one))
