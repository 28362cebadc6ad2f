"""Table C.1: the formats that weights and sampled weights need, looked for by rounding itself, beside the paper's."""

from __future__ import annotations

from fewbits.analysis.frames import Results
from fewbits.analysis.gaussws import theory
from fewbits.analysis.gaussws.arithmetic import table_c1_rows
from fewbits.analysis.paper import paper
from fewbits.analysis.registry import table
from fewbits.analysis.results import Setting, TableCell, TableResult, TableRow, Value

TIES = "Mantissa of ŵ, ties kept too (ours)"


@table("gaussws", "Table C.1")
def table_c1(results: Results) -> TableResult:
    said = paper("gaussws").table("Table C.1")
    found = table_c1_rows()
    rows = [
        TableRow(row.title, tuple(_cell(ours, theirs, said.source) for ours, theirs in found[row.id]), row.unit)
        for row in said.rows
    ]
    ties = tuple(_cell(float(theory.least_mantissa_bits(bits, ties=True)), None, "") for bits in theory.widths())
    notes = (
        "Ours are found, not computed from Proposition 3: the fewest bits of exponent whose least step is the one "
        "needed, and the fewest of mantissa with which a cast swallows no noise, whatever the weight and the maximum",
        "Noise on a maximum that is a power of two is half a step at b − 2 bits, a tie: keeping it takes one bit more",
    )
    return TableResult(tuple(column.title for column in said.columns), (*rows, TableRow(TIES, ties, "bits")), notes)


def _cell(ours: float | str, theirs: float | str | None, source: str) -> TableCell:
    return TableCell(Setting(ours, ()) if isinstance(ours, str) else Value(ours, None, 0, ()), theirs, source)
