"""Tabulate the cost of each arm: tokens, epochs, time and disk, and its numbers of seeds and axis values.

The trials are either planned or, where their data are not there yet, only outlined. A trial that several arms share is
counted in the first of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from fewbits.common.progress import clock
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning.cost import parameters_of, tokens_of
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.running.trial_status import table

HEAD = ("sweep", "arm", "model", "data", "tokens", "with trunk", "epochs", "trials", "time each", "time", "disk")


@dataclass(frozen=True)
class Share:
    """The part of the table that one place of a sweep adds."""

    cell: Cell
    trial: Trial
    key: Hashable  # equal for places that are the same computation
    earlier_tokens: int  # read by its parents before the trial branches
    corpus_tokens: int | None  # tokens of the training split
    seconds: float | None
    disk: int  # bytes

    @property
    def row(self) -> tuple[Hashable, ...]:
        """The values that all trials of one row have in common."""
        cell, trial = self.cell, self.trial
        tokens = tokens_of(trial), self.earlier_tokens, self.corpus_tokens
        return cell.sweep, cell.arm, trial.model.name, parameters_of(trial.model), trial.data, tokens


def arm_table(shares: Iterable[Share]) -> list[str]:
    """Return the lines of the table."""
    rows: dict[tuple[Hashable, ...], list[Share]] = {}
    first: dict[Hashable, Share] = {}
    for share in shares:
        rows.setdefault(share.row, []).append(share)
        first.setdefault(share.key, share)
    return table([HEAD, *(_row(members, first) for members in rows.values())])


def _row(members: list[Share], first: dict[Hashable, Share]) -> tuple[str, ...]:
    head = members[0]
    trial, tokens = head.trial, tokens_of(head.trial)
    own = {share.key: share for share in members if first[share.key].row == head.row}
    return (
        head.cell.sweep,
        head.cell.arm or "-",
        f"{trial.model.name}, {_short(parameters_of(trial.model)).replace('G', 'B')}",
        trial.data.kind,
        _short(tokens),
        _short(tokens + head.earlier_tokens) if head.earlier_tokens else "-",
        f"{(tokens + head.earlier_tokens) / head.corpus_tokens:.2g}" if head.corpus_tokens else "?",
        _count(members),
        *_cost(members, list(own.values()), first),
    )


def _cost(members: list[Share], own: list[Share], first: dict[Hashable, Share]) -> tuple[str, str, str]:
    """Return the mean time of a trial, then the total time and disk of the trials that no earlier row has counted."""
    times = [share.seconds for share in members if share.seconds is not None]
    each = clock(sum(times) / len(times)) if len(times) == len(members) else "?"
    if not own:
        earlier = first[members[0].key].cell
        return each, f"in {earlier.sweep}/{earlier.arm or '-'}", "-"
    known = [share.seconds for share in own if share.seconds is not None]
    total = clock(sum(known)) if len(known) == len(own) else "?"
    return each, total, f"{sum(share.disk for share in own) / 1e9:.1f} GB"


def _count(members: list[Share]) -> str:
    """Return the number of trials as text: `2 x 3 seeds` for two axis values and three seeds."""
    seeds = len({share.cell.seed for share in members})
    places = len({share.cell.axes for share in members})
    if places == 1:
        return f"{seeds} seed{'s' if seeds > 1 else ''}"
    if places * seeds == len(members):
        return f"{places} x {seeds} seed{'s' if seeds > 1 else ''}"
    return str(len(members))


def _short(count: float) -> str:
    """Return a count with three digits and a unit, as `1.47 G`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
