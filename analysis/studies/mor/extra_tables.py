"""Tables of our own: noise, power, which tensors fall back, and what the paper left open.

Changes are of validation loss, in percent, paired by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pandas as pd

from fewbits.analysis.engine.arms import AGAIN, BASELINE, arm_table
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.pairing import paired, sample
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.places import Where, not_planned
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.mor.tensors import (
    FC1,
    FC2,
    ONE,
    OUT,
    QKV,
    TWO,
    fallback_shares,
    first_windows,
    largest_accepted,
    tensors,
)
from fewbits.analysis.tables.cells import BLANK, PERCENT, cell, change, share
from fewbits.analysis.tables.noise import LOSSES, METRICS, VALIDATION, noise_table
from fewbits.analysis.tables.power import power_table

ARMS = arm_table("mor")


@table("mor", "Noise", "How far trials differ that should be the same")
def noise(results: Results) -> TableResult:
    """Compare BF16 and Block with themselves, their sums rounded in another order."""
    return noise_table(results, ARMS, (("watched", BASELINE), (AGAIN, BASELINE), ("block-again", "block")), ONE)


@table("mor", "Power", "What each comparison of losses can detect")
def power(results: Results) -> TableResult:
    """List the comparisons of losses that claims rest on."""
    return power_table(results, "mor")


# -------------------------------------------------------------------------------- tensors

KINDS: Mapping[str, Callable[[pd.DataFrame], pd.Series]] = {
    "All": lambda rows: rows["slot"].notna(),
    "QKV": lambda rows: rows["part"] == QKV,
    "Projection": lambda rows: rows["part"] == OUT,
    "FC1": lambda rows: rows["part"] == FC1,
    "FC2": lambda rows: rows["part"] == FC2,
    "Activations": lambda rows: rows["slot"].str.endswith(".x"),
    "Weights": lambda rows: rows["slot"].str.endswith(".w"),
    "Gradients": lambda rows: rows["slot"].str.endswith(".dy"),
    "FC2's activations": lambda rows: (rows["part"] == FC2) & rows["slot"].str.endswith(".x"),
}
SUB_TENSOR = ("two-way", "three-way")
BOUNDED = ("block", "tensor", "channel", "block-64", "threshold-5", "amax", "e8m0", *SUB_TENSOR)
MIXED = ("tensor", "block", "channel", "block-64", "threshold-5", "amax", "e8m0", *SUB_TENSOR, "sub-channel")
CONFIGURATIONS: Mapping[str, Where] = {"configuration 1": ONE, "configuration 2": TWO}


@table("mor", "Fallbacks", "Tensors in BF16, over whole runs (of sub-tensor arms: blocks)")
def fallbacks(results: Results) -> TableResult:
    """List each arm's share of tensors in BF16 by kind of tensor."""
    rows = tensors(results)
    shares = {title: fallback_shares(rows[choose(rows)]) for title, choose in KINDS.items()}
    shares["All, first window"] = fallback_shares(first_windows(rows))
    best = paper("mor").numbers["fallback-channel-c1"].value * PERCENT
    made = []
    for (name, where), arm in product(CONFIGURATIONS.items(), MIXED):
        if results.has(arm, where):
            said = best if (arm, where) == ("channel", ONE) else None
            cells = [share(results, of, arm, where, said if t == "All" else None) for t, of in shares.items()]
            made.append(TableRow(f"{ARMS.title(arm)}, {name}", tuple(cells), "%"))
    return TableResult(tuple(shares), tuple(made), ("Each tensor and window counts alike",))


@table("mor", "Errors and losses", "The largest error that an arm accepted, and its loss (M19)")
def errors_and_losses(results: Results) -> TableResult:
    """List the largest accepted error beside the change of loss."""
    accepted = largest_accepted(tensors(results))
    rows = []
    for arm in BOUNDED:
        if results.has(arm, ONE):
            by_blocks = TableCell(Setting("by blocks"))
            largest = by_blocks if arm in SUB_TENSOR else share(results, accepted, arm, ONE)
            rows.append(TableRow(ARMS.title(arm), (largest, change(results, VALIDATION, arm, where=ONE)), "%"))
    notes = ("Where tensors were refused, the largest accepted error is taken as the threshold",)
    return TableResult(("Largest error", "Change of validation loss"), tuple(rows), notes)


# -------------------------------------------------------------------------------- what the paper left open


@table("mor", "Thresholds", "Thresholds from 2 % to 8 %, 128×128 blocks")
def thresholds(results: Results) -> Table:
    """List losses and fallback at each threshold."""
    places = _combinations(results, "left-open", "threshold")
    if not places:
        return not_planned(results)
    shares = fallback_shares(tensors(results.of_sweep("left-open")))
    rows = [
        TableRow(f"{float(where['recipe.threshold']):.1%}", _row(results, "threshold", shares, where), "%")
        for where in places
    ]
    return TableResult((*LOSSES, "Tensors in BF16"), tuple(rows), ("Changes from BF16",))


@table("mor", "Sub-channel", "Blocks from the whole tensor to 1×128")
def sub_channel(results: Results) -> Table:
    """List losses and fallback by size of block."""
    if not results.has("sub-channel", ONE):
        return not_planned(results)
    shares = fallback_shares(tensors(results))
    arms = ("tensor", "block", "block-64", "channel", "sub-channel")
    rows = [TableRow(ARMS.title(arm), _row(results, arm, shares), "%") for arm in arms]
    return TableResult((*LOSSES, "Tensors in BF16"), tuple(rows), ("Changes from BF16",))


@table("mor", "Second rounding", "Scalings with and without rounding to BF16 after descaling")
def second_rounding(results: Results) -> Table:
    """Show that what is descaled by a power of two survives BF16, and what is descaled by another number does not."""
    if not results.has("fp32", ONE):
        return not_planned(results)

    def cells(arm: str, plain: str) -> tuple[TableCell, ...]:
        pairs = [(arm, BASELINE), (plain, "fp32"), *(() if arm == "block" else ((arm, "block"), (plain, "fp32-gam")))]
        found = [change(results, VALIDATION, ours, baseline, ONE) for ours, baseline in pairs]
        return tuple([*found, BLANK, BLANK][:4])

    arms = {"GAM": ("block", "fp32-gam"), "FP32 amax": ("amax", "fp32-amax"), "E8M0": ("e8m0", "fp32-e8m0")}
    rows = tuple(TableRow(title, cells(*names), "%") for title, names in arms.items())
    columns = ("From BF16, rounded to BF16", "From FP32, not rounded", "From GAM, rounded", "From GAM, not rounded")
    return TableResult(columns, rows, ("Changes of validation loss",))


@table("mor", "Outlook", "Three types: NVFP4, else E4M3, else BF16")
def outlook(results: Results) -> Table:
    """List losses and shares of a mixture that tries NVFP4 first."""
    if not results.has("outlook", ONE):
        return not_planned(results)
    numerics = results.numerics().dropna(subset=["share_0"])
    shares = [dict(numerics.groupby("id")[f"share_{entry}"].mean()) for entry in range(3)]
    cells = [change(results, metric, "outlook", where=ONE) for metric in METRICS]
    cells += [share(results, {str(k): float(v) for k, v in of.items()}, "outlook", where=ONE) for of in shares]
    columns = (*LOSSES, "In NVFP4", "In E4M3", "In BF16")
    row = TableRow(ARMS.title("outlook"), tuple(cells), "%")
    return TableResult(columns, (row,), ("Losses: changes from BF16",))


@table("mor", "Families", "Threshold, block and scaling in other families")
def families(results: Results) -> Table:
    """List loss and fallback in models of other families."""
    places = _combinations(results, "families", "mor")
    if not places:
        return not_planned(results)
    one = results.of_sweep("families")
    shares = fallback_shares(tensors(one))
    rows = [
        TableRow(
            " ".join(where.values()),
            (
                cell(paired(one, VALIDATION, "mor", BASELINE, where), PERCENT),
                cell(sample(one, shares, "mor", where), PERCENT),
            ),
            "%",
        )
        for where in places
    ]
    return TableResult(("Change of validation loss", "Tensors in BF16"), tuple(rows), ("Changes from BF16",))


def _row(results: Results, arm: str, shares: Mapping[str, float], where: Where = ONE) -> tuple[TableCell, ...]:
    changes = [change(results, metric, arm, where=where) for metric in METRICS]
    return (*changes, share(results, shares, arm, where))


def _combinations(results: Results, sweep: str, arm: str) -> Sequence[Mapping[str, str]]:
    """Return the combinations of the arm's axes; none where the scale does not run it."""
    members = (m for m in results.members if m.cell.sweep == sweep and m.cell.arm == arm)
    return [dict(axes) for axes in dict.fromkeys(member.cell.axes for member in members)]
