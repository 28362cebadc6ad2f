"""Figure A: every arm's effect beside the noise, the margins and the paper's number."""

from __future__ import annotations

from fewbits.analysis.arms import AGAIN, BAD, BASELINE, compared
from fewbits.analysis.effects import LOSS, NOISE, Effect, forest
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.mor.arms import AXIS
from fewbits.analysis.mor.looks import ABLATIONS, ARMS, PARTITIONS, SUB_TENSOR, Comparison, chosen
from fewbits.analysis.registry import figure
from fewbits.analysis.results import NotRun, Picture


@figure("mor", "Figure A", "Every arm's effect beside the noise")
def effects(results: Results) -> Picture:
    rows = measured(results)
    if not rows:
        return NotRun(results.scale_name)
    return forest(rows, (paper("mor").margin(claim) for claim in ("M17", "M3")), ("(2): configuration 2.",))


def measured(results: Results) -> list[Effect]:
    """Of configuration 1 first, then of 2; each arm once, where it is run."""
    found: dict[str, Effect] = {}
    for configuration in ("1", "2"):
        for of in (PARTITIONS, ABLATIONS, SUB_TENSOR):
            part = chosen(results, of.sweep, configuration)
            if isinstance(part, NotRun):
                continue
            group = f"{of.sweep} {configuration}"
            suffix = "" if configuration == "1" else " (2)"
            column = Comparison(of.sweep, of.table, of.arms, configuration)
            own = ((a, ARMS[a].label) for a in of.arms if a != BASELINE)
            labels = ((AGAIN, NOISE), *own, (BAD, ARMS[BAD].label)) if of is PARTITIONS else tuple(own)
            for arm, label in labels:
                pairs = compared(results, LOSS, arm, where={AXIS: configuration})
                if not isinstance(pairs, NotRun) and label + suffix not in found:
                    said = column.paper_change(LOSS, arm) if arm in of.arms else None
                    found[label + suffix] = Effect(label + suffix, pairs, said, group)
    return list(found.values())
