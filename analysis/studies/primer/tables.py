"""The second text's printed tables of casts, and our own table of formats."""

from __future__ import annotations

from functools import partial

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.primer.samples import casts
from fewbits.kernels.formats import TABLE


def _printed(results: Results, name: str) -> TableResult:
    """Return our casts beside those that the table with this id prints; numbers beyond the range become NaN."""
    rows = [
        TableRow(title, tuple(TableCell(Setting(a), b, "printed") for a, b in zip(ours, printed, strict=True)))
        for title, ours, printed in casts(name)
    ]
    return TableResult(("x1", "x2", "x3", "x4"), tuple(rows))


for _name in ("Table 1", "Table 2", "Table 3"):
    table("primer", _name)(partial(_printed, name=_name))


@table("primer", "Formats", title="Formats: largest, smallest normal and smallest subnormal number, and step")
def formats(results: Results) -> TableResult:
    rows = []
    for f in (TABLE[name] for name in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "e8m0", "fp16", "bf16")):
        least = f"{f.min_subnormal:.3g}" if f.has_zero else "none"
        cells = f.bits, f"{f.max:.5g}", f"{f.min_normal:.3g}", least, f"{2.0**-f.mantissa_bits:.3g}"
        rows.append(TableRow(f.name.upper(), tuple(TableCell(Setting(str(cell))) for cell in cells)))
    columns = ("bits", "largest", "normal", "subnormal", "step at 1")
    notes = ("INT8 and INT4 have codes from −128 to 127 and from −8 to 7, and one step everywhere.",)
    return TableResult(columns, tuple(rows), (*notes, "`fewbits number 0.3` rounds a number to every format."))
