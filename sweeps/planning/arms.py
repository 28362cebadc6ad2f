"""What the arms of sweeps take, a row each: tokens, epochs, time and disk, with seeds and axes counted.

Rows are made of trials that are planned or only outlined, whose data are not there yet. A trial that several arms ask
for is counted in the first of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning.cost import parameters_of, tokens_of
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.running.progress import clock
from fewbits.sweeps.running.trial_status import table

HEAD = ("sweep", "arm", "model", "data", "tokens", "with trunk", "epochs", "trials", "time each", "time", "disk")


@dataclass(frozen=True)
class Share:
    """What one place of a sweep adds to the table."""

    cell: Cell
    trial: Trial
    key: Hashable  # equal for places that are the same computation
    earlier_tokens: int  # read before the trial branches
    corpus_tokens: int | None  # of the training split
    seconds: float | None
    disk: int  # bytes

    @property
    def row(self) -> tuple[Hashable, ...]:
        """Return what trials of one row have in common."""
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
    one = members[0]
    trial, tokens = one.trial, tokens_of(one.trial)
    own = {share.key: share for share in members if first[share.key].row == one.row}
    return (
        one.cell.sweep,
        one.cell.arm or "-",
        f"{trial.model.name}, {_short(parameters_of(trial.model)).replace('G', 'B')}",
        trial.data.kind,
        _short(tokens),
        _short(tokens + one.earlier_tokens) if one.earlier_tokens else "-",
        f"{(tokens + one.earlier_tokens) / one.corpus_tokens:.2g}" if one.corpus_tokens else "?",
        _counted(members),
        *_taken(members, list(own.values()), first),
    )


def _taken(members: list[Share], own: list[Share], first: dict[Hashable, Share]) -> tuple[str, str, str]:
    """Return the time of each trial, and of those that no earlier row has counted the time and the disk of all."""
    times = [share.seconds for share in members if share.seconds is not None]
    each = clock(sum(times) / len(times)) if len(times) == len(members) else "?"
    if not own:
        other = first[members[0].key].cell
        return each, f"in {other.sweep}/{other.arm or '-'}", "-"
    known = [share.seconds for share in own if share.seconds is not None]
    whole = clock(sum(known)) if len(known) == len(own) else "?"
    return each, whole, f"{sum(share.disk for share in own) / 1e9:.1f} GB"


def _counted(members: list[Share]) -> str:
    """Return how many trials there are: values of axes by seeds."""
    seeds = len({share.cell.seed for share in members})
    places = len({share.cell.axes for share in members})
    if places == 1:
        return f"{seeds} seed{'s' if seeds > 1 else ''}"
    if places * seeds == len(members):
        return f"{places} x {seeds} seed{'s' if seeds > 1 else ''}"
    return str(len(members))


def _short(count: float) -> str:
    """Return a count with three digits and a unit: `1.47 G`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
