"""Make the table of noise: differences between arms that should be equal, and spreads of losses over seeds.

A spread is a standard deviation. All numbers are relative, in percent. A difference is between two trials with the same
seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fewbits.analysis.engine.claims.schema import LOSS as VALIDATION
from fewbits.analysis.engine.results.arms import AGAIN, BASELINE, ArmTable, arm_table
from fewbits.analysis.engine.results.data import Data, Differences, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import family_places, not_planned
from fewbits.analysis.engine.statistics.estimates import Pools, summary
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow
from fewbits.analysis.tables.arms import LOSSES
from fewbits.analysis.tables.cells import PERCENT, cell, spread
from fewbits.analysis.tables.comparing import compare, own_numbers, pools


@dataclass(frozen=True)
class NoiseRows:
    """The rows of the table for one family of sweeps.

    A family is a group of sweeps of one model whose arms start from the same trunks (see `ArmTable`).
    """

    sweep: str  # any sweep of the family
    name: str = ""  # the start of the titles of the family's rows
    pairs: dict[str, str] = field(default_factory=lambda: {AGAIN: BASELINE})  # arm → an arm that should be equal to it
    where: dict[str, str] = field(default_factory=dict)  # axis values of the arms


def noise_table(results: Results, study: str, of: Sequence[NoiseRows]) -> Table:
    """Return the table of noise of a study; it has a column for each loss (LOSSES).

    Each family in `of` has these rows: for each pair of arms that should be equal, the difference and its spread over
    seeds; the spread of BF16's losses; and for each kind of arms, the spread of the difference between two arms,
    estimated from all arms of this kind. One kind, for example, is all arms whose forward passes have formats of fewer
    than 8 bits (results/pooling.py).
    """
    table, rows = arm_table(study), []
    left_out: list[str] = []
    for family in of:
        part = family_places(results, table, family.sweep)
        if part.has(BASELINE, family.where):
            known = {metric: pools(part, metric, BASELINE, family.where) for metric in LOSSES.values()}
            start = f"{family.name}: " if family.name else ""
            rows += [replace(row, title=start + row.title) for row in _rows(part, table, family, list(known.values()))]
            left_out += _left_out(known[VALIDATION])
    notes = ("Spreads are standard deviations", *dict.fromkeys(left_out))
    return TableResult(tuple(LOSSES), tuple(rows), notes) if rows else not_planned(results)


def _rows(part: Results, table: ArmTable, of: NoiseRows, known: Sequence[Pools | None]) -> Iterator[TableRow]:
    for arm, baseline in of.pairs.items():
        data = [compare(part, metric, arm, baseline, of.where) for metric in LOSSES.values()]
        title = f"{table.title(arm)} minus {table.title(baseline)}"
        yield TableRow(title, tuple(cell(one, PERCENT) for one in data), "%")
        title = "its spread over seeds" if of.name else "    its spread over seeds"
        yield TableRow(title, tuple(map(spread, data)), "%")
    levels = tuple(_level_spread(own_numbers(part, metric, BASELINE, of.where)) for metric in LOSSES.values())
    yield TableRow("Spread of BF16 itself over seeds", levels, "%")
    kinds = dict.fromkeys(kind for one in known if one is not None for kind in one.of_kinds)
    for kind in kinds or [""]:
        title = f"Spread of a pair, {kind}" if len(kinds) > 1 else "Spread of a pair, pooled over arms"
        yield TableRow(title, tuple(_pooled_spread(one, kind) for one in known), "%")


def _pooled_spread(pools: Pools | None, kind: str) -> TableCell:
    if pools is None or kind not in pools.of_kinds:
        return TableCell(Setting("not known: only one arm or one seed"))
    pooled = pools.of_kinds[kind].spread
    return TableCell(Setting(f"{PERCENT * pooled.sd:.3f} (df {pooled.df})"))


def _left_out(pools: Pools | None) -> tuple[str, ...]:
    if pools is None or not pools.unlike:
        return ()
    names = "; ".join(sorted(pools.unlike))
    return (f"Not pooled for the validation loss are arms with a significantly greater spread of their own: {names}",)


def _level_spread(data: Data | NotPlanned) -> TableCell:
    if not isinstance(data, Differences):
        return cell(data)
    return spread(data, PERCENT / abs(summary(data.values).mean))
