"""Print a number's code and neighbours in every format (`fewbits number`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import print_json, print_table
from fewbits.kernels.number import Rounded, parse_number, rounded

ABSENT = "–"
NUMBERS = ("code", "value", "below", "above", "error %")


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "fewbits number",
        about="Round a number to every format, without a scale. Print the bits (sign, exponent, mantissa), the code, "
        "the rounded value and its neighbours in the format. Rounding is to nearest, ties to even; beyond a format's "
        "largest value, the result is that value. int8 and int4 have steps of 1/64 and 1/4, as in a quantizer.",
        examples="example: fewbits number 0.3, fewbits number 1/3 --json, fewbits number -- -448.5",
    )
    parser.add_argument("number", help="0.3, 0x1.8p-3, 1/3, inf or nan; write -- before a negative number")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    options = parser.parse_args(argv)
    number = parse_number(options.number)
    rows = rounded(number)
    if options.json:
        print_json([asdict(row) for row in rows])
    else:
        print_table(("format", "bits", *NUMBERS, "kind"), [_cells(row, number) for row in rows], right=NUMBERS)
    return 0


def _cells(row: Rounded, number: float) -> tuple[str, ...]:
    relative = abs(row.error / number) if number and math.isfinite(number) else math.nan
    return (
        row.format,
        row.bits,
        f"0x{row.code:x}",
        f"{row.value:.9g}",
        *(ABSENT if value is None else f"{value:.9g}" for value in (row.below, row.above)),
        f"{100 * relative:.4g}" if math.isfinite(relative) else ABSENT,
        row.kind,
    )
