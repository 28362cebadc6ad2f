"""Tables of our own: noise, power, and every arm from BF16 and from the whole recipe. Changes are in percent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fewbits.analysis.engine.arms import BASELINE, arm_table
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import family_places
from fewbits.analysis.report.items import Table, TableResult
from fewbits.analysis.report.registry import table
from fewbits.analysis.tables.noise import arms_table, noise_table, sweep_arms
from fewbits.analysis.tables.power import power_table

ARMS = arm_table("nvfp4")


@table("nvfp4", "Noise", "How far trials differ that should be the same")
def noise(results: Results) -> TableResult:
    """Compare BF16 with itself, its sums rounded in another order."""
    return noise_table(family_places(results, ARMS, "recipe"), ARMS)


@table("nvfp4", "Power", "What each comparison of losses can detect")
def power(results: Results) -> TableResult:
    """List the comparisons of losses that claims rest on."""
    return power_table(results, "nvfp4")


@dataclass(frozen=True)
class ArmsTable:
    """A table of all arms of some sweeps."""

    name: str
    title: str
    sweeps: tuple[str, ...]  # the first names the family that they are compared in
    whole: str = "nvfp4"  # the arm that validation losses are compared with, too
    whole_title: str = "NVFP4"
    baseline: str = BASELINE


TABLES = (
    ArmsTable(
        "Recipe",
        "Every arm of the same model, from BF16 and from the whole recipe",
        ("recipe", "rounding", "hadamard", "consistency", "switch"),
    ),
    ArmsTable("Blocks", "Which blocks stay in BF16, of 20", ("layers",), "nvfp4-base", "plain NVFP4"),
    ArmsTable("Hybrids", "The hybrid's arms", ("hybrid",)),
    ArmsTable(
        "From scratch",
        "Trained from scratch in the arm's own formats",
        ("scratch",),
        "nvfp4-whole",
        baseline="bf16-whole",
    ),
    ArmsTable("Outlook", "What came after the paper (not its own arms), beside its recipe", ("outlook",)),
)


def all_arms(results: Results, of: ArmsTable) -> Table:
    """Return the table of all arms of these sweeps."""
    part = family_places(results, ARMS, of.sweeps[0])
    arms = sweep_arms(results, *of.sweeps)
    return arms_table(part, ARMS, arms, whole=of.whole, title=of.whole_title, baseline=of.baseline)


for _one in TABLES:
    table("nvfp4", _one.name, _one.title)(partial(all_arms, of=_one))
