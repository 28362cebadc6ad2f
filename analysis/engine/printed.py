"""Turn the paper's own numbers into data: a test checks that each number is supported by its own claim's check.

A printed number stands for an effect without spread, in many seeds, at the paper's own scale.
"""

from __future__ import annotations

from fewbits.analysis.engine.claims import DIRECTIONS, NULLS, Comparison
from fewbits.analysis.engine.data import Differences
from fewbits.analysis.engine.pairs import LATE
from fewbits.analysis.engine.paper import paper

SEEDS = 20  # enough for a test of signs, as equal values are tested


def printed_effect(study: str, comparison: Comparison) -> float | None:
    """Return the paper's own effect for a comparison, in the comparison's units; None if the paper prints none."""
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
    """Return the printed effect as the differences of SEEDS equal pairs; None if the paper prints none."""
    effect = printed_effect(study, comparison)
    if effect is None:
        return None
    paired = comparison.test in (*DIRECTIONS, *NULLS)
    return Differences((effect,) * SEEDS, relative=paired and comparison.part.relative)
