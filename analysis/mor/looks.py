"""The arms of the MoR study as its figures show them: their names and looks, and where the paper has their numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fewbits.analysis.frames import Results
from fewbits.analysis.paper import paper
from fewbits.analysis.plots import BASELINE, LOOKS, Look
from fewbits.analysis.results import NotRun

BF16 = "bf16"
AGAIN = "bf16-again"  # A/A
WATCHED = "watched"  # BF16 to the bit, with the errors that E4M3 would have made under 128x128
TRUNK = "trunk"  # likewise; what arms branch from
BAD = "bad-arm"
THRESHOLD = paper("mor").numbers["threshold"].value


@dataclass(frozen=True)
class Arm:
    name: str
    label: str
    look: Look


ARMS = {
    arm.name: arm
    for arm in (
        Arm(BF16, "BF16", BASELINE),
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


PARTITIONS = Comparison("partitions", "Table 2", (BF16, "block", "tensor", "channel"))
PARTITIONS_2 = replace(PARTITIONS, configuration="2")
ABLATIONS = Comparison("ablations", "Table 3", (BF16, "block", "block-64", "threshold-5", "amax", "e8m0"))
SUB_TENSOR = Comparison("sub-tensor", "Table 4", (BF16, "two-way", "three-way"))


def scale(results: Results) -> str:
    """Its name, `cpu` say."""
    return " and ".join(dict.fromkeys(member.scale for member in results.members))


def chosen(results: Results, sweep: str, configuration: str) -> Results | NotRun:
    """Of one sweep the places of one configuration."""
    if sweep not in {one.name for one in results.plan.sweeps}:
        return NotRun(scale(results))
    plan = results.of_sweep(sweep).plan
    members = tuple(m for m in plan.members if dict(m.cell.axes).get("configuration", "1") == configuration)
    return Results(replace(plan, members=members)) if members else NotRun(scale(results))
