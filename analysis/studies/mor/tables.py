"""Make MoR's Tables 1 to 4 with the paper's numbers and ours, and a table of our own: tensors in BF16 by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import pandas as pd

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import BASELINE, Where, arm_table, trial_ids
from fewbits.analysis.report.items import TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import FC1, FC2, ONE, OUT, QKV, TWO
from fewbits.analysis.tables.cells import (
    PERCENT,
    UNSTATED,
    SettingsColumn,
    cell,
    own_numbers,
    paper_losses,
    settings_table,
)
from fewbits.common.wording import plural

ARMS = arm_table("mor")
MODEL = "Nemotron-3 8B"

for _name in ("Table 2", "Table 3", "Table 4"):
    table("mor", _name)(partial(paper_losses, study="mor", name=_name))


@table("mor", "Table 1")
def table_1(results: Results) -> TableResult:
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
MIXTURES = (
    *("tensor", "block", "block-64", "channel", "threshold-5", "amax", "e8m0"),
    *("two-way", "three-way", "sub-channel"),
)
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
            found = {title: own_numbers(results, of, arm, where) for title, of in shares.items()}
            cells = [cell(data, PERCENT, printed if t == "All" else None, "inferred") for t, data in found.items()]
            made.append(TableRow(f"{ARMS.title(arm)}, {name}", tuple(cells), "%"))
    return TableResult(tuple(shares), tuple(made), ("All tensors and windows have equal weight",))
