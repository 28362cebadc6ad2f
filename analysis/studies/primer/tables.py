"""The primer's printed cast table, and our own tables of formats, of rules for MX's scale, and of sums."""

from __future__ import annotations

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.primer import blocks, grids, sums
from fewbits.kernels.formats import TABLE
from fewbits.kernels.number import rounded

FORMATS = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "e8m0", "bf16", "fp16")


@table("primer", "Table 1")
def table_1(results: Results) -> TableResult:
    """Compare our casts of the printed numbers with the printed results."""
    printed = paper("primer").table("Table 1")
    rows = []
    for row in printed.rows:
        ours = grids.cast(grids.LOSS_OF_PRECISION["fp32"], row.id)
        cells = [
            TableCell(Setting(grids.as_printed(value)), f"{there:g}", printed.source)
            for value, there in zip(ours, row.values, strict=True)
        ]
        rows.append(TableRow(row.title, tuple(cells)))
    return TableResult(tuple(column.title for column in printed.columns), tuple(rows))


def _own(columns: tuple[str, ...], rows: dict[str, tuple[str, ...]], notes: tuple[str, ...] = ()) -> TableResult:
    made = tuple(
        TableRow(title, tuple(TableCell(Setting(text), "", "") for text in cells)) for title, cells in rows.items()
    )
    return TableResult(columns, made, notes)


@table("primer", "Table F", title="Formats: range, steps, subnormals and special codes")
def formats(results: Results) -> TableResult:
    rows: dict[str, tuple[str, ...]] = {}
    for name in FORMATS:
        f = TABLE[name]
        infinities, nans = grids.special_codes(name)
        rows[name.upper()] = (
            str(f.bits),
            f"{f.max:g}",
            f"{f.min_normal:.4g}",
            f"{f.min_subnormal:.4g}" if f.has_zero else "none",
            f"{2.0**-f.mantissa_bits:g}",
            f"{infinities} and {nans:,}",
        )
    columns = ("bits", "largest", "smallest normal", "smallest subnormal", "step at 1", "codes of inf and NaN")
    return _own(columns, rows, ("INT8 and INT4 have steps of one everywhere: −127 to 127 and −7 to 7 with this scale",))


@table("primer", "Table N", title="The number 0.3 in every format")
def number(results: Results) -> TableResult:
    rows: dict[str, tuple[str, ...]] = {
        row.format.upper(): (
            row.bits,
            f"{row.value:.9g}",
            "none" if row.below is None else f"{row.below:.9g}",
            "none" if row.above is None else f"{row.above:.9g}",
        )
        for row in rounded(0.3)
    }
    return _own(("bits", "value", "below", "above"), rows, ("`fewbits number 0.3` prints the same for any number",))


@table(
    "primer",
    "Table S",
    title="Relative squared error of MXFP4 by rule for its scale, and the share that saturates",
)
def rules(results: Results) -> TableResult:
    rows = {}
    for name in blocks.samples():
        found = blocks.mx_rules(name)
        rows[name] = tuple(f"{error:.4f} ({share:.1%})" for error, share in found.values())
    return _own(("floor (OCP)", "nearest", "up, nothing saturates"), rows)


@table("primer", "Table K", title="Relative error of sums, by accumulator and number of products K")
def accumulators(results: Results) -> TableResult:
    rows = {}
    for name in sums.SUMS:
        for distribution in ("uniform", "normal"):
            found = [sums.errors(name, distribution, k) for k in sums.LENGTHS]
            rows[f"{name}, {distribution}"] = tuple(f"{mean:.2%} ± {half:.2%}" for mean, half in found)
    return _own(tuple(f"K = {k}" for k in sums.LENGTHS), rows, ("± is a 95 % interval over rows",))
