"""Print a number's code and neighbours in one format or all (`fewbits number`)."""

from __future__ import annotations

import math
import re
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
        about="Round a number to a format of quantizers, or to all, without a scale. Print the bits (sign, exponent, "
        "mantissa), the code, the rounded value and its neighbours in the format. Rounding is to nearest, ties to "
        "even; beyond a format's largest value, the result is that value. int8 and int4 have steps of 1/64 and 1/4, as "
        "in a quantizer.",
        examples="examples: fewbits number 0.3, fewbits number -1/3 E4M3, fewbits number 448.5 e5m3 --json",
    )
    parser.add_argument("number", help="0.3, -0x1.8p-3, 1/3, inf or nan")
    parser.add_argument("format", nargs="?", help="such as e4m3 or any eXmY; without it, all named formats")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    # argparse takes -1/3 for an option, but not with a blank before it, which float() ignores.
    options = parser.parse_args([f" {word}" if re.match(r"-(\d|\.|inf|nan)", word.lower()) else word for word in argv])
    number = parse_number(options.number.strip())
    rows = rounded(number, options.format)
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
