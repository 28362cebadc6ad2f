"""The primer's printed tables of casts, and our own tables: formats, encodings, libraries, rules for scales, sums."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.primer import blocks, grids, sums, walks
from fewbits.analysis.views.html import render
from fewbits.kernels.formats import TABLE
from fewbits.kernels.number import INTEGERS, rounded

FORMATS = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "e8m0", "bf16", "fp16")


def _printed(name: str, kind: str) -> TableResult:
    """Return a table that compares casts that the primer's text 002 prints with our casts of the same inputs.

    name: the table's id. kind: a key of `grids.TABLES`. In the table of overflow, casts beyond the range give NaN.
    """
    printed = paper("primer").table(name)
    inputs = grids.TABLES[kind]["fp32"]
    rows = []
    for row in printed.rows:
        ours = grids.cast(inputs, row.id, "nan" if kind == "overflow" else "saturate")
        cells = [
            TableCell(Setting(grids.as_printed(value)), there, printed.source)
            for value, there in zip(ours, row.text, strict=True)
        ]
        rows.append(TableRow(row.title, tuple(cells)))
    shown = ", ".join(map(grids.as_printed, inputs))
    return TableResult(tuple(column.title for column in printed.columns), tuple(rows), (f"FP32 inputs: {shown}",))


@table("primer", "Table 1")
def table_1(results: Results) -> TableResult:
    return _printed("Table 1", "loss of precision")


@table("primer", "Table 2")
def table_2(results: Results) -> TableResult:
    return _printed("Table 2", "overflow")


@table("primer", "Table 3")
def table_3(results: Results) -> TableResult:
    return _printed("Table 3", "underflow")


def _own(columns: tuple[str, ...], rows: dict[str, tuple[str, ...]], notes: tuple[str, ...] = ()) -> TableResult:
    """Return a table whose cells are texts of our own, without numbers of the paper.

    rows: the texts of the cells, by the row's title.
    """
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
            f"{f.max:.4g}" if f.max > 1e6 else f"{f.max:g}",
            f"{f.min_normal:.4g}",
            f"{f.min_subnormal:.4g}" if f.has_zero else "none",
            f"{2.0**-f.mantissa_bits:g}",
            f"{infinities}, {nans:,}",
        )
    columns = ("bits", "largest", "least normal", "least subnormal", "step at 1", "inf, NaN codes")
    return _own(columns, rows, ("INT8 and INT4 have a step of 1 everywhere; their codes are −127 to 127 and −7 to 7",))


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
    made = _own(
        ("bits", "value", "below", "above"), rows, ("The command `fewbits number` prints these columns for any number",)
    )
    return replace(made, control=render("number", number="0.3", formats=number_formats()))


def number_formats() -> dict[str, dict[str, int | float | bool | None]]:
    """Return {format: its constants} for the script in the report that encodes a number in every format.

    The constants are, for example, the numbers of bits and the exponent bias. The key `integer` tells whether a format
    is an integer format, which has a step instead of exponent and mantissa bits. The script is in
    views/templates/number.html.
    """
    facts: dict[str, dict[str, int | float | bool | None]] = {
        name: {
            "integer": False,
            "bits": f.bits,
            "exponent": f.exponent_bits,
            "mantissa": f.mantissa_bits,
            "bias": f.bias,
            "emin": f.emin,
            "zero": f.has_zero,
            "signed": f.signed,
            "max": f.max_code,
            "nan": f.code_of(math.nan) if f.has_nan else None,
        }
        for name, f in TABLE.items()
    }
    for name, (bits, step) in INTEGERS.items():
        largest = (1 << bits - 1) - 1
        facts[name] = {"integer": True, "bits": bits, "step": step, "max": largest, "nan": None}
        facts[name] |= {"zero": True, "signed": True}
    return facts


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


BEYOND = (448.0, 460.0, 464.0, 465.0, 2438.37, math.inf, math.nan)


@table("primer", "Table L", title="What libraries make of numbers beyond E4M3's largest value, 448")
def libraries(results: Results) -> TableResult:
    x = torch.tensor(BEYOND)
    found = {f"torch {torch.__version__.partition('+')[0]}": x.to(torch.float8_e4m3fn).float().tolist()}
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        notes: tuple[str, ...] = ("ml_dtypes is not installed here, so its column is missing",)
    else:
        with np.errstate(invalid="ignore"):
            cast = x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
        found[f"ml_dtypes {ml_dtypes.__version__}"] = cast
        notes = ()
    found |= {f"fewbits, overflow={rule}": list(grids.cast(BEYOND, "e4m3", rule)) for rule in TABLE["e4m3"].overflows}
    rows = {f"{x:g}": tuple(f"{values[i]:g}" for values in found.values()) for i, x in enumerate(BEYOND)}
    notes += (
        "464 is halfway between 448 and 480, which would be the next value; a tie is rounded to the even code, 448",
    )
    return _own(tuple(found), rows, notes)


@table("primer", "Table W", title=f"The number {walks.NUMBER:g} in a block, walked through three encodings")
def walk(results: Results) -> TableResult:
    found = walks.walks()
    steps = next(iter(found.values())).steps
    rows = {step: tuple(one.steps[step] for one in found.values()) for step in steps}
    notes = (
        "codes are in binary: sign, exponent and mantissa; MXINT8's code is in two's complement, in steps of 1/64",
        "MX scales follow OCP's floor rule. The bits an element do not include NVFP4's FP32 scale of the tensor",
    )
    return _own(tuple(found), rows, notes)
