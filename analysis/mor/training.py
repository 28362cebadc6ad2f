"""Figures 5, 6, 8 and 20: how arms train beside BF16."""

from __future__ import annotations

from collections.abc import Sequence

from fewbits.analysis.curves import LOSS, NORM, VALIDATION, Metric, Row, training
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.mor.looks import ABLATIONS, PARTITIONS, PARTITIONS_2, SUB_TENSOR, Comparison, chosen
from fewbits.analysis.registry import figure
from fewbits.analysis.results import NotRun, Picture


@figure("mor", "Figure 5")
def figure_5(results: Results) -> Picture:
    return _training(results, PARTITIONS, (LOSS, VALIDATION, NORM))


@figure("mor", "Figure 6")
def figure_6(results: Results) -> Picture:
    return _training(results, PARTITIONS_2, (LOSS, VALIDATION, NORM))


@figure("mor", "Figure 8")
def figure_8(results: Results) -> Picture:
    return _training(results, ABLATIONS, (LOSS, VALIDATION, NORM))


@figure("mor", "Figure 20")
def figure_20(results: Results) -> Picture:
    return _training(results, SUB_TENSOR, (LOSS, VALIDATION))


def _training(results: Results, of: Comparison, metrics: Sequence[Metric]) -> Picture:
    part = chosen(results, of.sweep, of.configuration)
    if isinstance(part, NotRun):
        return part
    return training([Row(part, of.shown, metric, noise(results, of)) for metric in metrics])


def noise(results: Results, of: Comparison) -> Results | None:
    """Where A/A is run in the same configuration."""
    found = chosen(results, PARTITIONS.sweep, of.configuration)
    return found if isinstance(found, Results) else None
