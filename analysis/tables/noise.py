"""The table of noise of every study: how far trials differ that should be the same.

Changes are of losses, in percent, paired by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fewbits.analysis.engine.arms import AGAIN, BASELINE, ArmTable, arm_table
from fewbits.analysis.engine.claims import LOSS as VALIDATION
from fewbits.analysis.engine.data import Data, Differences, NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import family_places, not_planned
from fewbits.analysis.engine.statistics import Pools, summary
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow
from fewbits.analysis.tables.arms import LOSSES
from fewbits.analysis.tables.cells import PERCENT, cell, spread
from fewbits.analysis.tables.comparing import compare, own_numbers, pools


@dataclass(frozen=True)
class NoiseRows:
    """A family whose noise is shown: arms that should be the same, each with its baseline."""

    sweep: str
    name: str = ""  # before the titles of its rows
    pairs: dict[str, str] = field(default_factory=lambda: {AGAIN: BASELINE})
    where: dict[str, str] = field(default_factory=dict)


def noise_table(results: Results, study: str, of: Sequence[NoiseRows]) -> Table:
    """Return the floor of every paired difference, and the spread between seeds without pairs."""
    table, rows = arm_table(study), []
    left_out: list[str] = []
    for one in of:
        part = family_places(results, table, one.sweep)
        if part.has(BASELINE, one.where):
            known = {metric: pools(part, metric, BASELINE, one.where) for metric in LOSSES.values()}
            start = f"{one.name}: " if one.name else ""
            rows += [replace(row, title=start + row.title) for row in _rows(part, table, one, list(known.values()))]
            left_out += _left_out(known[VALIDATION])
    notes = ("Spreads are standard deviations", *dict.fromkeys(left_out))
    return TableResult(tuple(LOSSES), tuple(rows), notes) if rows else not_planned(results)


def _rows(part: Results, table: ArmTable, of: NoiseRows, known: Sequence[Pools | None]) -> Iterator[TableRow]:
    for arm, baseline in of.pairs.items():
        data = [compare(part, metric, arm, baseline, of.where) for metric in LOSSES.values()]
        yield TableRow(f"{table.title(arm)} less {table.title(baseline)}", tuple(cell(d, PERCENT) for d in data), "%")
        yield TableRow(
            "its spread over seeds" if of.name else "    its spread over seeds", tuple(map(spread, data)), "%"
        )
    levels = tuple(_level_spread(own_numbers(part, metric, BASELINE, of.where)) for metric in LOSSES.values())
    yield TableRow("Spread of BF16 itself over seeds", levels, "%")
    kinds = dict.fromkeys(kind for one in known if one is not None for kind in one.of_kinds)
    for kind in kinds or [""]:
        title = f"Spread of a pair, {kind}" if len(kinds) > 1 else "Spread of a pair, pooled over arms"
        yield TableRow(title, tuple(_pooled_spread(one, kind) for one in known), "%")


def _pooled_spread(found: Pools | None, kind: str) -> TableCell:
    if found is None or kind not in found.of_kinds:
        return TableCell(Setting("not known: one arm, or one seed"))
    one = found.of_kinds[kind].spread
    return TableCell(Setting(f"{PERCENT * one.sd:.3f} (df {one.df})"))


def _left_out(found: Pools | None) -> tuple[str, ...]:
    if found is None or not found.unlike:
        return ()
    names = "; ".join(sorted(found.unlike))
    return (f"Not pooled for validation loss, as their own spread is greater than chance makes it: {names}",)


def _level_spread(data: Data | NotPlanned) -> TableCell:
    if not isinstance(data, Differences):
        return cell(data)
    return spread(data, PERCENT / abs(summary(data.values).mean))
