"""Make the table of power: the minimum detectable effect of each comparison of validation losses in the claims."""

from __future__ import annotations

from collections.abc import Iterator

from fewbits.analysis.engine.claims.pairs import data_of
from fewbits.analysis.engine.claims.schema import (
    BOUNDED,
    DIRECTIONS,
    LOSS,
    Comparison,
    comparisons,
    load_claims,
    studies_with_claims,
)
from fewbits.analysis.engine.results.arms import ArmTable, arm_table
from fewbits.analysis.engine.results.data import Data, Differences, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.statistics.estimates import estimate
from fewbits.analysis.engine.statistics.power import detectable, seeds_needed
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.tables.cells import PERCENT, UNKNOWN, cell, spread
from fewbits.analysis.tables.comparing import resolve

COLUMNS = ("Change, %", "Spread over seeds, %", "Minimum detectable effect, %", "Margin", "Seeds for the margin")
NOTES = (
    "80 % power, one-sided test at 5 %",
    "The minimum detectable effect uses the spread pooled over all arms of the same kind that start alike; it uses the "
    "pair's own spread if an arm is the only one of its kind, or if the pair's own spread is larger",
)


def power_table(results: Results, study: str) -> TableResult:
    """Return a table of power: a row for each comparison of validation losses with a margin that this scale can make.

    A scale can make a comparison if its plan has trials of the compared arms.

    Claims with the same comparison and margin share a row, whose title lists their ids.
    """
    table = arm_table(study)
    rows: dict[tuple[str, float], tuple[tuple[str, ...], Data]] = {}
    for claim, comparison in _loss_comparisons(study):
        data = data_of(results, comparison, resolve)
        if not isinstance(data, Differences | NoData) or comparison.margin is None:
            continue
        key = (_title(table, comparison), comparison.margin.value)
        claims, _ = rows.get(key, ((), data))
        rows[key] = ((*claims, claim), data)
    made = [
        TableRow(f"{', '.join(dict.fromkeys(claims))}: {title}", _cells(data, margin))
        for (title, margin), (claims, data) in rows.items()
    ]
    return TableResult(COLUMNS, tuple(made), NOTES)


def _cells(data: Data, margin: float) -> tuple[TableCell, ...]:
    margin_cell = TableCell(Setting(f"{margin:.2%}"))
    estimated = None
    if isinstance(data, Differences) and data.values:
        estimated = estimate(data.values, data.spread, data.shared)
    if estimated is None:
        return cell(data, PERCENT), spread(data), UNKNOWN, margin_cell, UNKNOWN
    least, seeds = detectable(estimated), seeds_needed(estimated, margin)
    detected = UNKNOWN if least is None else TableCell(Value(PERCENT * least, None, estimated.n, data.trials))
    needed = TableCell(Setting("more than 200" if seeds is None else str(seeds), data.trials))
    return cell(data, PERCENT), spread(data), detected, margin_cell, needed


def _loss_comparisons(study: str) -> Iterator[tuple[str, Comparison]]:
    for claim in load_claims(study).claims if study in studies_with_claims() else ():
        for comparison in comparisons(claim):
            if (
                comparison.test in (*DIRECTIONS, *BOUNDED)
                and comparison.metric == LOSS
                and comparison.arm
                and comparison.part.relative
            ):
                yield claim.id, comparison


def _title(table: ArmTable, comparison: Comparison) -> str:
    place = ", ".join(f"{axis} {value}" for axis, value in comparison.where.items())
    title = f"{table.title(comparison.arm)} minus {table.title(comparison.baseline)}"
    return ", ".join(filter(None, (title, place, comparison.part.sweep)))
