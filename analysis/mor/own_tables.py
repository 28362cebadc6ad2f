"""Tables of our own: how far noise goes, what the comparisons can tell, which tensors fall back, and what the paper
left open. Changes are of validation loss, in percent, paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pandas as pd

from fewbits.analysis.arms import AGAIN, BASELINE, Where, compared, having
from fewbits.analysis.cells import BLANK, PERCENT, cell, change, share
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.mor.arms import CONFIGURATIONS, ONE, TITLES
from fewbits.analysis.noise import LOSSES, VALIDATION, Comparison, losses, noise_table, power_table
from fewbits.analysis.registry import table
from fewbits.analysis.results import NotRun, Setting, TableCell, TableResult, TableRow
from fewbits.analysis.studies.mor.tensors import FC1, FC2, OUT, QKV, fallback_shares, first, largest_accepted, looked_at

Rows = list[TableRow]


def titled(arm: str) -> str:
    return TITLES.get(arm, arm)


# -------------------------------------------------------------------------------- noise and power


@table("mor", "Noise", "How far trials are apart that should be the same")
def noise(results: Results) -> TableResult:
    pairs = (("watched", BASELINE), (AGAIN, BASELINE), ("block-again", "block"))
    return noise_table(results, pairs, TITLES, ONE)


def comparisons() -> list[Comparison]:
    found: dict[tuple[str, str, float], list[str]] = {}
    for claim in paper("mor").claims:
        if VALIDATION in claim.metric:
            assert claim.baseline is not None
            for arm in claim.arms:
                found.setdefault((arm, claim.baseline, paper("mor").margin(claim.id)), []).append(claim.id)
    return [Comparison(*key, tuple(claims)) for key, claims in found.items()]


@table("mor", "Power", "What each comparison of losses can tell")
def power(results: Results) -> TableResult:
    rows = ((one, compared(results, VALIDATION, one.arm, one.baseline, ONE)) for one in comparisons())
    return power_table(rows, TITLES)


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
MIXED = ("tensor", "block", "channel", "block-64", "threshold-5", "amax", "e8m0", "two-way", "three-way", "sub-channel")


@table("mor", "Fallbacks", "Tensors in BF16, over whole runs (of sub-tensor arms: blocks)")
def fallbacks(results: Results) -> TableResult:
    rows = looked_at(results)
    shares = {title: fallback_shares(rows[choose(rows)]) for title, choose in KINDS.items()}
    shares["All, first window"] = fallback_shares(first(rows))
    best = paper("mor").numbers["fallback-channel-c1"].value * PERCENT
    made = []
    for (name, where), arm in product(CONFIGURATIONS.items(), MIXED):
        if having(results, arm, where=where) is None:
            continue
        said = best if (arm, where) == ("channel", ONE) else None
        cells = [share(results, of, arm, where, said if t == "All" else None) for t, of in shares.items()]
        made.append(TableRow(f"{titled(arm)}, {name}", tuple(cells), "%"))
    return TableResult(tuple(shares), tuple(made), ("Each tensor and window alike",))


@table("mor", "Errors and losses", "The largest error that an arm accepted, and its loss (M19)")
def errors_and_losses(results: Results) -> TableResult:
    accepted = largest_accepted(looked_at(results))
    rows = []
    for arm in paper("mor").claim("M19").arms:
        if having(results, arm, where=ONE) is not None:
            largest = (
                share(results, accepted, arm, where=ONE)
                if arm not in SUB_TENSOR
                else TableCell(Setting("by blocks", ()))
            )
            rows.append(TableRow(titled(arm), (largest, change(results, VALIDATION, arm, where=ONE)), "%"))
    notes = ("Where tensors were refused, the largest accepted error is taken as the threshold",)
    return TableResult(("Largest error", "Change of validation loss"), tuple(rows), notes)


# -------------------------------------------------------------------------------- what the paper left open


@table("mor", "Thresholds", "Thresholds from 2 % to 8 %, 128×128 blocks")
def thresholds(results: Results) -> TableResult | NotRun:
    places = _combinations(results, "left-open", "threshold")
    if not places:
        return NotRun(results.scale_name)
    shares = fallback_shares(looked_at(results.of_sweep("left-open")))
    rows = [
        TableRow(f"{float(where['recipe.threshold']):.1%}", _row(results, "threshold", shares, where), "%")
        for where in places
    ]
    return TableResult((*LOSSES, "Tensors in BF16"), tuple(rows), ("Changes from BF16",))


@table("mor", "Sub-channel", "Blocks from the whole tensor to 1×128")
def sub_channel(results: Results) -> TableResult | NotRun:
    if having(results, "sub-channel", where=ONE) is None:
        return NotRun(results.scale_name)
    shares = fallback_shares(looked_at(results))
    arms = ("tensor", "block", "block-64", "channel", "sub-channel")
    rows = [TableRow(titled(arm), _row(results, arm, shares), "%") for arm in arms]
    return TableResult((*LOSSES, "Tensors in BF16"), tuple(rows), ("Changes from BF16",))


@table("mor", "Second rounding", "Scalings with and without rounding to BF16 after descaling")
def second_rounding(results: Results) -> TableResult | NotRun:
    """What is descaled by a power of two survives BF16, what is descaled by another number is rounded once more."""
    if having(results, "fp32", where=ONE) is None:
        return NotRun(results.scale_name)
    rows = [
        TableRow(
            title,
            (
                change(results, VALIDATION, arm, where=ONE),
                change(results, VALIDATION, f"fp32-{plain}", "fp32", where=ONE),
                BLANK if arm == "block" else change(results, VALIDATION, arm, "block", where=ONE),
                BLANK if arm == "block" else change(results, VALIDATION, f"fp32-{plain}", "fp32-gam", where=ONE),
            ),
            "%",
        )
        for title, arm, plain in (("GAM", "block", "gam"), ("FP32 amax", "amax", "amax"), ("E8M0", "e8m0", "e8m0"))
    ]
    columns = ("From BF16, rounded to BF16", "From FP32, not rounded", "From GAM, rounded", "From GAM, not rounded")
    return TableResult(columns, tuple(rows), ("Changes of validation loss",))


@table("mor", "Outlook", "Three types: NVFP4, else E4M3, else BF16")
def outlook(results: Results) -> TableResult | NotRun:
    if having(results, "outlook", where=ONE) is None:
        return NotRun(results.scale_name)
    numerics = results.numerics().dropna(subset=["share_0"])
    shares = [dict(numerics.groupby("id")[f"share_{entry}"].mean()) for entry in range(3)]
    cells = [change(results, metric, "outlook", where=ONE) for metric in losses(results)]
    cells += [share(results, {str(k): float(v) for k, v in of.items()}, "outlook", where=ONE) for of in shares]
    columns = (*LOSSES, "In NVFP4", "In E4M3", "In BF16")
    return TableResult(columns, (TableRow("NVFP4 | E4M3 | BF16", tuple(cells), "%"),), ("Losses: changes from BF16",))


@table("mor", "Families", "Threshold, block and scaling in other families")
def families(results: Results) -> TableResult | NotRun:
    places = _combinations(results, "families", "mor")
    if not places:
        return NotRun(results.scale_name)
    one = results.of_sweep("families")
    shares = fallback_shares(looked_at(one))
    rows = [
        TableRow(
            " ".join(where.values()),
            (
                cell(one.paired(VALIDATION, "mor", BASELINE, where), PERCENT),
                cell(one.sample(shares, "mor", where), PERCENT),
            ),
            "%",
        )
        for where in places
    ]
    return TableResult(("Change of validation loss", "Tensors in BF16"), tuple(rows), ("Changes from BF16",))


def _row(results: Results, arm: str, shares: Mapping[str, float], where: Where = ONE) -> tuple[TableCell, ...]:
    return (
        *(change(results, metric, arm, where=where) for metric in losses(results)),
        share(results, shares, arm, where),
    )


def _combinations(results: Results, sweep: str, arm: str) -> Sequence[Mapping[str, str]]:
    """Of the arm's axes; none where the scale does not run it."""
    members = (m for m in results.members if m.cell.sweep == sweep and m.cell.arm == arm)
    return [dict(axes) for axes in dict.fromkeys(member.cell.axes for member in members)]
