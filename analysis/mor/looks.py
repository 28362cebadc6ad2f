"""The arms of the MoR study as its figures show them: their names and looks, and where the paper has their numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fewbits.analysis import plots
from fewbits.analysis.arms import BAD, BASELINE
from fewbits.analysis.curves import Arm, Shown
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.plots import LOOKS
from fewbits.analysis.results import NotRun

WATCHED = "watched"  # BF16 to the bit, with the errors that E4M3 would have made under 128x128; the trunk is likewise
THRESHOLD = paper("mor").numbers["threshold"].value

ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "BF16", plots.BASELINE),
        Arm("block", "Block", LOOKS[0]),
        Arm("tensor", "Tensor", LOOKS[1]),
        Arm("channel", "Channel", LOOKS[2]),
        Arm("block-64", "64×64", LOOKS[1]),
        Arm("threshold-5", "Threshold 5.0 %", LOOKS[2]),
        Arm("amax", "FP32 amax", LOOKS[3]),
        Arm("e8m0", "E8M0", LOOKS[4]),
        Arm("two-way", "Two-way", LOOKS[1]),
        Arm("three-way", "Three-way", LOOKS[3]),
        Arm(BAD, "E2M1 per tensor", LOOKS[5]),
    )
}


@dataclass(frozen=True)
class Comparison:
    """Arms of one sweep that one figure shows, and where the paper has their numbers."""

    sweep: str
    table: str
    arms: tuple[str, ...]
    configuration: str = "1"

    def column(self, arm: str) -> str:
        return f"c{self.configuration}-{arm}" if self.table == "Table 2" else arm

    def paper(self, row: str, arm: str) -> float | None:
        return paper("mor").table(self.table).value(row, self.column(arm))

    def paper_change(self, row: str, arm: str) -> float | None:
        return paper("mor").table(self.table).change(row, self.column(arm))

    @property
    def shown(self) -> Shown:
        return Shown(tuple(ARMS[arm] for arm in self.arms), ARMS[BASELINE], said=self.paper_change)


PARTITIONS = Comparison("partitions", "Table 2", (BASELINE, "block", "tensor", "channel"))
PARTITIONS_2 = replace(PARTITIONS, configuration="2")
ABLATIONS = Comparison("ablations", "Table 3", (BASELINE, "block", "block-64", "threshold-5", "amax", "e8m0"))
SUB_TENSOR = Comparison("sub-tensor", "Table 4", (BASELINE, "two-way", "three-way"))


def chosen(results: Results, sweep: str, configuration: str) -> Results | NotRun:
    """Of one sweep the places of one configuration."""
    if sweep not in {one.name for one in results.plan.sweeps}:
        return NotRun(results.scale_name)
    one = results.of_sweep(sweep)
    members = tuple(m for m in one.members if dict(m.cell.axes).get("configuration", "1") == configuration)
    return one.of_places(members) if members else NotRun(results.scale_name)
