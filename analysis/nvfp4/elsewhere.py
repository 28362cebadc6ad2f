"""Figure 3: NVFP4 beside FP8 on text of another kind, in place of the paper's tasks, with its last MMLU beside."""

from __future__ import annotations

from fewbits.analysis.elsewhere import Row, elsewhere
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.nvfp4.looks import Group, chosen, noise, shown
from fewbits.analysis.registry import figure
from fewbits.analysis.results import Picture

GROUPS = (Group("recipe", ("nvfp4",), "fp8", "6 blocks"), Group("hybrid", ("nvfp4",), "fp8", "hybrid"))


@figure("nvfp4", "Figure 3")
def figure_3(results: Results) -> Picture:
    scores = {}
    for arm in ("fp8", "nvfp4"):
        value = paper("nvfp4").table("Table 2").value("mmlu", arm)
        assert value is not None
        scores[arm] = value / 100
    rows = {
        group.name: Row(chosen(results, group.sweep), shown(group, GROUPS), scores, noise(results, group.sweep))
        for group in GROUPS
    }
    return elsewhere(rows, "MMLU")
