"""The table of power: what each comparison of losses that claims rest on can detect."""

from __future__ import annotations

from collections.abc import Iterator

from fewbits.analysis.engine.arms import ArmTable, arm_table
from fewbits.analysis.engine.claims import (
    DIRECTIONS,
    LOSS,
    NULLS,
    Comparison,
    comparisons,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.pairs import data_of
from fewbits.analysis.engine.power import detectable, seeds_needed
from fewbits.analysis.engine.statistics import estimate
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.tables.cells import PERCENT, UNKNOWN, cell, spread
from fewbits.analysis.tables.comparing import resolve

COLUMNS = ("Change, %", "Spread over seeds, %", "Minimum detectable effect, %", "Margin", "Seeds for the margin")
NOTES = (
    "80 % power, one-sided test at 5 %",
    "From the spread of a pair, pooled over all arms of its kind that start alike; from the pair's own where an arm is "
    "the only one of its kind or spreads further than it",
)


def power_table(results: Results, study: str) -> TableResult:
    """Return a row for each comparison of validation losses; claims that rest on the same one share it."""
    table = arm_table(study)
    rows: dict[tuple[str, float], tuple[tuple[str, ...], Data]] = {}
    for claim, one in _loss_comparisons(study):
        data = data_of(results, one, resolve)
        if not isinstance(data, Differences | NoData) or one.margin is None:
            continue
        key = (_title(table, one), one.margin.value)
        claims, _ = rows.get(key, ((), data))
        rows[key] = ((*claims, claim), data)
    made = [
        TableRow(f"{', '.join(dict.fromkeys(claims))}: {title}", _cells(data, margin))
        for (title, margin), (claims, data) in rows.items()
    ]
    return TableResult(COLUMNS, tuple(made), NOTES)


def _cells(data: Data, margin: float) -> tuple[TableCell, ...]:
    stated = TableCell(Setting(f"{margin:.2%}"))
    known = None
    if isinstance(data, Differences) and data.values:
        known = estimate(data.values, data.spread, data.shared)
    if known is None:
        return cell(data, PERCENT), spread(data), UNKNOWN, stated, UNKNOWN
    least, seeds = detectable(known), seeds_needed(known, margin)
    found = UNKNOWN if least is None else TableCell(Value(PERCENT * least, None, known.n, data.trials))
    needed = TableCell(Setting("more than 200" if seeds is None else str(seeds), data.trials))
    return cell(data, PERCENT), spread(data), found, stated, needed


def _loss_comparisons(study: str) -> Iterator[tuple[str, Comparison]]:
    for claim in load_claims(study).claims if study in studies_with_claims() else ():
        for one in comparisons(claim):
            if one.test in (*DIRECTIONS, *NULLS) and one.metric == LOSS and one.arm and one.part.relative:
                yield claim.id, one


def _title(table: ArmTable, one: Comparison) -> str:
    place = ", ".join(f"{axis} {value}" for axis, value in one.where.items())
    title = f"{table.title(one.arm)} less {table.title(one.baseline)}"
    return ", ".join(filter(None, (title, place, one.part.sweep)))
