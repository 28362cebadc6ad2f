"""Tables of our own: noise, power, and what bit widths depend on."""

from __future__ import annotations

from dataclasses import replace

from fewbits.analysis.engine.arms import arm_table
from fewbits.analysis.engine.data import NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import not_planned, sweep_places
from fewbits.analysis.report.items import Table, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.gaussws.widths import FAMILIES, finals
from fewbits.analysis.tables.cells import change, level, share
from fewbits.analysis.tables.noise import VALIDATION, noise_table
from fewbits.analysis.tables.power import power_table
from fewbits.models.observer import TIERS

ARMS = arm_table("gaussws")
WIDTHS = ("gaussws", "8-to-6", "6-to-0", "lambda-0", "lambda-100", "same-rate", "no-decay")


@table("gaussws", "Noise", "How far trials differ that should be the same")
def noise(results: Results) -> Table:
    """Compare BF16 with itself in each family that runs here."""
    parts = {name: sweep_places(results, sweep) for name, sweep in FAMILIES.items()}
    made = {name: noise_table(part, ARMS) for name, part in parts.items() if isinstance(part, Results)}
    if not made:
        return not_planned(results)
    rows = (replace(row, title=f"{name}: {row.title.strip()}") for name, one in made.items() for row in one.rows)
    notes = tuple(dict.fromkeys(note for one in made.values() for note in one.notes))
    return TableResult(next(iter(made.values())).columns, tuple(rows), notes)


@table("gaussws", "Power", "What each comparison of losses can detect")
def power(results: Results) -> TableResult:
    """List the comparisons of losses that claims rest on."""
    return power_table(results, "gaussws")


@table("gaussws", "Widths", "What bit widths depend on: where they begin, λ, and what the paper leaves open")
def widths(results: Results) -> Table:
    """List mean widths, tiers and losses of GPT-2's arms."""
    part = sweep_places(results, "widths")
    if isinstance(part, NotPlanned):
        return part
    ended = finals(part)
    mean = {key: one.mean for key, one in ended.items()}
    rows = []
    for arm in WIDTHS:
        shares = (share(part, {key: one.tiers[tier] for key, one in ended.items()}, arm) for tier in TIERS)
        title = "6 to 4 bits, λ = 1e-4" if arm == "gaussws" else ARMS.title(arm)
        rows.append(TableRow(title, (level(part, mean, arm), *shares, change(part, VALIDATION, arm))))
    columns = ("Mean bits", *(f"Up to {tier}, %" for tier in TIERS), "Validation loss, from BF16, %")
    return TableResult(columns, tuple(rows), ("Bits at the end, of GPT-2; shares of parameters",))
