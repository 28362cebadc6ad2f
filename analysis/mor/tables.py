"""MoR's Tables 1 to 4: the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable

from fewbits.analysis.arms import BASELINE, Where, ids
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import Column as PapersColumn
from fewbits.analysis.engine.paper import Table, paper
from fewbits.analysis.mor.arms import ONE, TWO
from fewbits.analysis.outcomes import Column, outcomes
from fewbits.analysis.registry import table
from fewbits.analysis.results import TableCell, TableResult, TableRow
from fewbits.analysis.settings import SETTINGS, SILENT, Describe, flops, model, setting
from fewbits.analysis.show.markup import plural

NOTES = (
    "Losses are of other models, data and tokens than the paper's, so that levels do not compare. Changes do: each is "
    "of the arm from BF16 in the same configuration, ours paired by seed; ± is a 95 % interval",
    "Training losses are means over the last tenth of the steps, the same batches in all arms of a seed",
)
Place = Callable[[str], tuple[str, Where]]  # of a column's id: an arm, in a configuration


@table("mor", "Table 2")
def table_2(results: Results) -> TableResult:
    def place(column: str) -> tuple[str, Where]:
        configuration, arm = column.split("-", 1)
        return arm, {"c1": ONE, "c2": TWO}[configuration]

    return _outcomes(results, "Table 2", place)


@table("mor", "Table 3")
def table_3(results: Results) -> TableResult:
    return _outcomes(results, "Table 3", lambda column: (column, ONE))


@table("mor", "Table 4")
def table_4(results: Results) -> TableResult:
    return _outcomes(results, "Table 4", lambda column: (column, ONE))


def _outcomes(results: Results, name: str, place: Place) -> TableResult:
    said: Table = paper("mor").table(name)
    return outcomes(results, said, [_column(column, place) for column in said.columns], NOTES)


def _column(said: PapersColumn, place: Place) -> Column:
    baseline = None if said.baseline is None else place(said.baseline)[0]
    return Column(said.heading, *place(said.id), baseline, said.id)


MODEL = "Nemotron-3 8B"


@table("mor", "Table 1")
def table_1(results: Results) -> TableResult:
    """Ours from the trials' own configs: those of the BF16 arms."""
    said = paper("mor").table("Table 1")
    places = (ONE, TWO)

    def cells(describe: Describe, of_paper: tuple[float | str | None, ...], source: str) -> list[TableCell]:
        return [
            TableCell(
                setting(results, BASELINE, describe, where, assumed=value is None), value, source, comparable=False
            )
            for where, value in zip(places, of_paper, strict=True)
        ]

    rows = [TableRow("Model", tuple(cells(model, (MODEL, MODEL), said.source)))]
    rows += [
        TableRow(row.title, tuple(cells(SETTINGS[row.id], row.values or row.text, row.source or said.source)), row.unit)
        for row in said.rows
    ]
    rows += [TableRow(title, tuple(cells(describe, (None, None), "lost"))) for title, describe in SILENT.items()]
    rows.append(TableRow("FLOPs of one arm", tuple(cells(flops, (None, None), "lost"))))
    seeds = len(ids(results, BASELINE, ONE))
    return TableResult(
        tuple(column.title for column in said.columns),
        tuple(rows),
        (f"The paper ran each arm once; ours, with {plural(seeds, 'seed')}", "Assumed: what the paper does not state"),
    )
