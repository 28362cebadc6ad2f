"""MoR's Tables 1 to 4: the paper's numbers beside ours."""

from __future__ import annotations

from functools import partial

from fewbits.analysis.engine.arms import BASELINE
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.places import trial_ids
from fewbits.analysis.report.items import TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.mor.tensors import ONE, TWO
from fewbits.analysis.tables.losses import paper_losses
from fewbits.analysis.tables.settings import SETTINGS, UNSTATED, Describe, flops, model, setting
from fewbits.analysis.views.numbers import plural

MODEL = "Nemotron-3 8B"

for _name in ("Table 2", "Table 3", "Table 4"):
    table("mor", _name)(partial(paper_losses, study="mor", name=_name))


@table("mor", "Table 1")
def table_1(results: Results) -> TableResult:
    """Compare the settings: ours are those of the BF16 arms' own configs."""
    printed = paper("mor").table("Table 1")

    def cells(describe: Describe, of_paper: tuple[float | str | None, ...], source: str) -> tuple[TableCell, ...]:
        return tuple(
            TableCell(
                setting(results, BASELINE, describe, where, assumed=value is None), value, source, comparable=False
            )
            for where, value in zip((ONE, TWO), of_paper, strict=True)
        )

    rows = [TableRow("Model", cells(model, (MODEL, MODEL), printed.source))]
    rows += [
        TableRow(row.title, cells(SETTINGS[row.id], row.values or row.text, row.source or printed.source), row.unit)
        for row in printed.rows
    ]
    rows += [TableRow(title, cells(describe, (None, None), "lost")) for title, describe in UNSTATED.items()]
    rows.append(TableRow("FLOPs of one arm", cells(flops, (None, None), "lost")))
    seeds = plural(len(trial_ids(results, BASELINE, ONE)), "seed")
    notes = (f"The paper ran each arm once; ours, with {seeds}", "Assumed: what the paper does not state")
    return TableResult(tuple(column.title for column in printed.columns), tuple(rows), notes)
