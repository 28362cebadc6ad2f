"""The paper's own numbers, as data: each has to be supported by its own check (a test goes through all of them).

A printed number is an effect with no spread, seen in many seeds, at the scale where the paper saw it.
"""

from __future__ import annotations

from fewbits.analysis.engine.claims import DIRECTIONS, NULLS, Comparison
from fewbits.analysis.engine.data import Differences
from fewbits.analysis.engine.pairs import LATE
from fewbits.analysis.engine.paper import paper

SEEDS = 20  # enough for a test of signs


def printed_effect(study: str, comparison: Comparison) -> float | None:
    """Return what the paper prints of a comparison, on the comparison's own scale; None where it prints nothing."""
    printed = comparison.part.printed
    if printed is None:
        return None
    names = {
        "arm": comparison.arm,
        "baseline": comparison.baseline,
        "metric": comparison.metric.removesuffix(LATE),
        "value": comparison.value,
    }
    source = paper(study)
    if printed.number or printed.value is not None:
        value = source.numbers[printed.number.format(**names)].value if printed.number else printed.value
        return -value if printed.negative and value is not None else value
    table, row, column = source.table(printed.table), printed.row.format(**names), printed.column.format(**names)
    value = table.value(row, column)
    if value is None or not printed.baseline:
        return value
    base = table.value(row, printed.baseline.format(**names))
    if base is None:
        return None
    return (value - base) / abs(base) if comparison.part.relative else value - base


def printed_data(study: str, comparison: Comparison) -> Differences | None:
    """Return the printed number as many equal pairs; None where the paper prints nothing."""
    effect = printed_effect(study, comparison)
    if effect is None:
        return None
    paired = comparison.test in (*DIRECTIONS, *NULLS)
    return Differences((effect,) * SEEDS, relative=paired and comparison.part.relative)
