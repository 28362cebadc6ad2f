"""Tabulate for the dry run what each arm costs: tokens, epochs, numbers of seeds and axis values, time and disk space.

If several arms contain the same trial, the columns `total time` and `disk` count it only in the first of these arms.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from fewbits.common.progress import clock
from fewbits.sweeps.planning.cost import Speeds, disk, parameters_of, tokens_of
from fewbits.sweeps.planning.plan import Member, Plan

COLUMNS = (
    "sweep",
    "arm",
    "model",
    "data",
    "tokens",
    "with trunk's",
    "epochs",
    "trials",
    "time each",
    "total time",
    "disk",
)


def arm_rows(plan: Plan, corpus_tokens: Mapping[str, int | None]) -> Iterator[tuple[str, ...]]:
    """Yield a row with the values of COLUMNS for each arm; several rows if its trials differ in model, tokens or data.

    corpus_tokens: by trial id, the number of tokens in the trial's training split; None: unknown.
    """
    speeds = Speeds(plan.store)
    arms: dict[Hashable, list[Member]] = {}
    first: dict[str, Member] = {}  # by trial id: the first place of the trial, in whose arm the trial is counted
    for member in plan.members:
        planned = plan.trials[member.id]
        trial = planned.trial
        model = trial.model.name, parameters_of(trial.model)
        read = tokens_of(trial), planned.earlier_tokens, trial.data, corpus_tokens[member.id]
        arms.setdefault((member.cell.sweep, member.cell.arm, model, read), []).append(member)
        first.setdefault(member.id, member)
    for members in arms.values():
        head, planned = members[0].cell, plan.trials[members[0].id]
        trial, earlier, corpus = planned.trial, planned.earlier_tokens, corpus_tokens[planned.id]
        tokens = tokens_of(trial)
        times = {member.id: speeds.estimate(plan.trials[member.id])[0] for member in members}
        each = [times[member.id] for member in members]
        own = [member.id for member in members if first[member.id] is member]
        shared_with = first[planned.id].cell
        yield (
            head.sweep,
            head.arm or "-",
            f"{trial.model.name}, {_short(parameters_of(trial.model)).replace('G', 'B')}",
            trial.data.kind,
            _short(tokens),
            _short(tokens + earlier) if earlier else "-",
            f"{(tokens + earlier) / corpus:.2g}" if corpus else "?",
            _count(members),
            _time_text(each, len(each)),
            _time_text([times[key] for key in own]) if own else f"in {shared_with.sweep}/{shared_with.arm or '-'}",
            f"{disk(plan.trials[key] for key in own) / 1e9:.1f} GB" if own else "-",
        )


def _time_text(times: list[float | None], divided_by: int = 1) -> str:
    """Return the sum of the times, divided by `divided_by`, as text like `1:30` (90 s); `?` if a time is None.

    times: seconds; None: unknown.
    """
    known = [seconds for seconds in times if seconds is not None]
    return clock(sum(known) / divided_by) if len(known) == len(times) else "?"


def _count(members: list[Member]) -> str:
    """Return an arm's number of trials as text: `2 x 3 seeds` for two combinations of axis values with three seeds.

    If the sweep excludes some of these combinations, return only the number of trials. members: the arm's places.
    """
    seeds = len({member.cell.seed for member in members})
    places = len({member.cell.axes for member in members})
    if places * seeds != len(members):
        return str(len(members))
    return f"{f'{places} x ' if places > 1 else ''}{seeds} seed{'s' if seeds > 1 else ''}"


def _short(count: float) -> str:
    """Return a count with three digits and a unit (k, M, G or T), for example `1.47 G`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
