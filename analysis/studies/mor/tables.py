"""Make MoR's Tables 1 to 4 with the paper's numbers and ours, and three tables that the paper does not have.

These three tables show fallbacks, accepted errors, and the effect of rounding to BF16 after quantized values are
divided by their scale. A change is a difference between the validation losses of an arm and its baseline with the same
seed, in percent of the baseline's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import pandas as pd

from fewbits.analysis.engine.claims.schema import LOSS
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import BASELINE, Where, arm_table, not_planned, trial_ids
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import FC1, FC2, ONE, OUT, QKV, TWO
from fewbits.analysis.tables.cells import (
    BLANK,
    PERCENT,
    UNSTATED,
    SettingsColumn,
    change,
    paper_losses,
    settings_table,
    share,
)
from fewbits.common.wording import plural

ARMS = arm_table("mor")
MODEL = "Nemotron-3 8B"

for _name in ("Table 2", "Table 3", "Table 4"):
    table("mor", _name)(partial(paper_losses, study="mor", name=_name))


@table("mor", "Table 1")
def table_1(results: Results) -> TableResult:
    """Return a table of training settings: the paper's, and those in the configs of our BF16 arms."""
    columns = [SettingsColumn(MODEL, results, BASELINE, where) for where in (ONE, TWO)]
    seeds = plural(len(trial_ids(results, BASELINE, ONE)), "seed")
    notes = (f"The paper ran each arm once; we ran each arm with {seeds}",)
    return settings_table(paper("mor").table("Table 1"), columns, UNSTATED, notes)


# -------------------------------------------------------------------------------- tensors

# The columns of the table of fallbacks: by title, a function that selects rows of the table `tensors`.
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
MIXTURES, BY_BLOCKS = ARMS.lists["mixtures"], ARMS.lists["by blocks"]
CONFIGURATIONS: Mapping[str, Where] = {"configuration 1": ONE, "configuration 2": TWO}


@table("mor", "Fallbacks", "Tensors in BF16 over whole runs (blocks in sub-tensor arms)")
def fallbacks(results: Results) -> TableResult:
    """Return a table of shares of tensors (for sub-tensor arms, blocks) in BF16, with a column for each of KINDS."""
    rows = tensors.tensors(results)
    shares = {title: tensors.fallback_shares(rows[choose(rows)]) for title, choose in KINDS.items()}
    shares["All, first window"] = tensors.fallback_shares(tensors.first_windows(rows))
    best = paper("mor").numbers["fallback-channel-c1"].value * PERCENT
    made = []
    for (name, where), arm in product(CONFIGURATIONS.items(), MIXTURES):
        if results.has(arm, where):
            printed = best if (arm, where) == ("channel", ONE) else None
            cells = [share(results, of, arm, where, printed if t == "All" else None) for t, of in shares.items()]
            made.append(TableRow(f"{ARMS.title(arm)}, {name}", tuple(cells), "%"))
    return TableResult(tuple(shares), tuple(made), ("All tensors and windows have equal weight",))


@table("mor", "Errors and losses", "The largest error that an arm accepted, and its loss (M19)")
def errors_and_losses(results: Results) -> TableResult:
    """Return a table by arm: the largest error of a tensor that its mixture accepted, and the change of the loss."""
    accepted = tensors.largest_accepted(tensors.tensors(results))
    rows = []
    for arm in MIXTURES:
        if results.has(arm, ONE):
            by_blocks = TableCell(Setting("by blocks"))
            largest = by_blocks if arm in BY_BLOCKS else share(results, accepted, arm, ONE)
            rows.append(TableRow(ARMS.title(arm), (largest, change(results, LOSS, arm, where=ONE)), "%"))
    notes = ("If some error exceeded the threshold, the largest accepted one was not recorded; the threshold is shown",)
    return TableResult(("Largest error", "Change of validation loss"), tuple(rows), notes)


@table("mor", "Second rounding", "Scalings with and without rounding to BF16 after descaling")
def second_rounding(results: Results) -> Table:
    """Return a table of changes of the loss by scaling: from no quantization, and from GAM.

    Each change is shown with and without rounding to BF16 after descaling, which divides quantized values by the scale.
    If the scale is a power of two, the results are exact in BF16; otherwise this rounding is a second one after E4M3's.
    """
    if not results.has("fp32", ONE):
        return not_planned(results)

    def cells(arm: str, plain: str) -> tuple[TableCell, ...]:
        pairs = [(arm, BASELINE), (plain, "fp32"), *(() if arm == "block" else ((arm, "block"), (plain, "fp32-gam")))]
        found = [change(results, LOSS, ours, baseline, ONE) for ours, baseline in pairs]
        return tuple([*found, BLANK, BLANK][:4])

    arms = {"GAM": ("block", "fp32-gam"), "FP32 amax": ("amax", "fp32-amax"), "E8M0": ("e8m0", "fp32-e8m0")}
    rows = tuple(TableRow(title, cells(*names), "%") for title, names in arms.items())
    columns = ("From BF16, rounded to BF16", "From FP32, not rounded", "From GAM, rounded", "From GAM, not rounded")
    return TableResult(columns, rows, ("Changes of the validation loss",))
