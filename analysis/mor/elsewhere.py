"""Figures 7, 9 and 21: arms on text of another kind, in place of MMLU, with the paper's last MMLU beside."""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.arms import BASELINE
from fewbits.analysis.elsewhere import Row, elsewhere
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.mor.looks import ABLATIONS, PARTITIONS, PARTITIONS_2, SUB_TENSOR, Comparison, chosen
from fewbits.analysis.mor.training import noise
from fewbits.analysis.registry import figure
from fewbits.analysis.results import Picture


@figure("mor", "Figure 7")
def figure_7(results: Results) -> Picture:
    return _elsewhere(results, {"configuration 1": PARTITIONS, "configuration 2": PARTITIONS_2})


@figure("mor", "Figure 9")
def figure_9(results: Results) -> Picture:
    sizes = Comparison(ABLATIONS.sweep, ABLATIONS.table, (BASELINE, "block", "block-64", "threshold-5"))
    scalings = Comparison(ABLATIONS.sweep, ABLATIONS.table, (BASELINE, "block", "amax", "e8m0"))
    return _elsewhere(results, {"block size, threshold": sizes, "scaling": scalings})


@figure("mor", "Figure 21")
def figure_21(results: Results) -> Picture:
    return _elsewhere(results, {"sub-tensor": SUB_TENSOR})


def _elsewhere(results: Results, comparisons: Mapping[str, Comparison]) -> Picture:
    rows = {}
    for name, of in comparisons.items():
        scores = {arm: value / 100 for arm in of.arms if (value := of.paper("mmlu", arm)) is not None}
        rows[name] = Row(chosen(results, of.sweep, of.configuration), of.shown, scores, noise(results, of))
    return elsewhere(rows, "MMLU")
