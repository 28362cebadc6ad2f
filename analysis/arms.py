"""A study's arms: where a plan has them, and one arm beside another, seed by seed.

`where` is values of a sweep's axes, as many as it takes to leave one combination; none of a sweep without axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fewbits.analysis.engine.alike import why_not_compared
from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.frames import Metric, Results, treatment
from fewbits.analysis.engine.statistics import Pools, differences
from fewbits.analysis.results import NotRun
from fewbits.analysis.verdicts import Verdict, not_run
from fewbits.sweeps.planning.plan import Member
from fewbits.sweeps.running.store import OVER, State

BASELINE = "bf16"  # of every study
AGAIN = "bf16-again"  # A/A: the same mathematics, its sums rounded in another order
BAD = "bad-arm"  # the control
TRUNK = "trunk"  # what arms branch from

Where = Mapping[str, str]
ANYWHERE: Where = {}


def having(results: Results, *arms: str, where: Where = ANYWHERE) -> Results | None:
    """The first sweep that has all of these arms there, else all of the results where these have them: those of one
    name are the same trials."""
    for name in dict.fromkeys(member.cell.sweep for member in results.members):
        one = results.of_sweep(name)
        if all(one.has(arm, where if arm == arms[0] else None) for arm in arms):
            return one
    return results if all(results.has(arm, where) for arm in arms) else None


def compared(
    results: Results, metric: Metric, arm: str, baseline: str = BASELINE, where: Where = ANYWHERE
) -> Data | NotRun:
    """The arm less its baseline, relative to that; their spread is that of all arms of their kinds, started alike."""
    one = having(results, arm, baseline, where=where)
    if one is None:
        return NotRun(results.scale_name)
    found = one.paired(metric, arm, baseline, where)
    if isinstance(found, NoData) or not any(found.values):  # the same bits: no chance in it
        return found
    known = pooled(results, metric, baseline, where)
    both = [treatment(name, m.cell.axes) for name in (arm, baseline) for m in one.members if _is(m, name, where)]
    return replace(found, spread=known.of(*both)) if known else found


def pooled(results: Results, metric: Metric, baseline: str = BASELINE, where: Where = ANYWHERE) -> Pools | None:
    """Of the arms that start as the baseline does, kind by kind; computed once for each metric and place."""
    name = metric if isinstance(metric, str) else str(sorted(metric.items()))
    return results.remembered(
        f"pooled {name} {baseline} {where}", lambda: results.pooled(metric, baseline, where, {BAD})
    )


def own(results: Results, metric: Metric, arm: str, where: Where = ANYWHERE) -> Data | NotRun:
    """The arm's numbers themselves."""
    one = having(results, arm, where=where)
    return NotRun(results.scale_name) if one is None else one.sample(metric, arm, where)


def ids(results: Results, arm: str, where: Where = ANYWHERE) -> dict[int, str]:
    """Its trials' ids by seed; none where it is not run."""
    one = having(results, arm, where=where)
    if one is None:
        return {}
    rows = one.members
    return {m.cell.seed: m.id for m in rows if _is(m, arm, where)}


def _is(member: Member, arm: str, where: Where) -> bool:
    return member.cell.arm == arm and set(where.items()) <= set(member.cell.axes)


def curves_apart(results: Results, metric: str) -> Callable[[str, str], float | None]:
    """Of two trials: how far their curves are from each other where that is farthest, as a part of the second's."""
    rows = results.curves(metric).drop_duplicates(["id", "step"])
    curves = {key: curve.set_index("step")["value"] for key, curve in rows.groupby("id")}

    def between(ours: str, baseline: str) -> float | None:
        if not {ours, baseline} <= set(curves):
            return None
        a, b = curves[ours].align(curves[baseline], join="inner")
        return None if a.empty else float(abs(differences(a, b, relative=True)).max())

    return between


Place = tuple[str, Where]  # an arm, in one combination of its axes


def seed_by_seed(
    results: Results, numbers: Mapping[str, float], ours: Place, baseline: Place, *, relative: bool = False
) -> Differences | NoData:
    """As `Results.paired`, of two combinations of axes, which share initial weights and not always data.

    numbers: by trial. A trial that is not done has none. relative: they are losses, and divergence is an event.
    """
    rows = {row["id"]: row for row in results.rows}
    states = {key: row["state"] for key, row in rows.items()}
    left, right = ids(results, *ours), ids(results, *baseline)
    found, notes, events = [], [], [0, 0]
    for seed in left:
        pair = [i for i in (left[seed], right.get(seed)) if i is not None and states[i] in OVER]
        if len(pair) == 2 and (
            unlike := why_not_compared(rows[pair[0]], (ours[0], baseline[0]), rows[pair[1]], results.usual_kind)
        ):
            notes.append(unlike)
            continue
        gone = [states[i] == State.DIVERGED for i in pair]
        if len(pair) == 2 and not any(gone) and set(pair) <= set(numbers):
            found += differences([numbers[pair[0]]], [numbers[pair[1]]], relative=relative).tolist()
        elif relative and len(pair) == 2 and gone[0] != gone[1]:
            events[gone[1]] += 1
        else:
            notes.append(f"{ours[0]} and {baseline[0]}, seed {seed}: not both done")
    trials = tuple(dict.fromkeys([*left.values(), *right.values()]))
    if not found and not any(events):
        return NoData("; ".join(notes), trials)
    return Differences(tuple(found), relative, trials, tuple(notes), diverged=events[0], baseline_diverged=events[1])


def decided(found: Data | NotRun, decide: Callable[[Data], Verdict]) -> Verdict:
    """Of what this scale runs."""
    return not_run(found.scale) if isinstance(found, NotRun) else decide(found)
