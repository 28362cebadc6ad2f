"""Tables and a figure of our own: how far noise goes, what comparisons tell, what widths depend on, every effect."""

from __future__ import annotations

from dataclasses import replace

from fewbits.analysis.arms import AGAIN, BASELINE, compared
from fewbits.analysis.cells import change, level, share
from fewbits.analysis.effects import LOSS, NOISE, Effect, forest
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.gaussws.arms import (
    DIFFQ,
    FAMILIES,
    MINI,
    MINI_DIFFQ,
    MINI_OURS,
    OURS,
    PARTS,
    TITLES,
    chosen,
)
from fewbits.analysis.gaussws.widths import finals
from fewbits.analysis.noise import VALIDATION, Comparison, noise_table, power_table
from fewbits.analysis.registry import figure, table
from fewbits.analysis.results import NotRun, Picture, Table, TableResult, TableRow
from fewbits.models.observer import TIERS

margin = paper("gaussws").margin
COMPARED = (  # what claims about losses rest on: family, arm, baseline, claim
    ("GPT-2", OURS, DIFFQ, "G8"),
    ("GPT-2", OURS, BASELINE, "G9"),
    ("Llama 2", BASELINE, DIFFQ, "G13"),
    ("Llama 2", DIFFQ, OURS, "G13"),
)


@table("gaussws", "Noise", "How far trials are apart that should be the same")
def noise(results: Results) -> Table:
    """Of each family that runs here."""
    made: list[TableResult] = []
    for name, sweep in FAMILIES.items():
        part = chosen(results, sweep)
        if isinstance(part, Results):
            found = noise_table(part, ((AGAIN, BASELINE),), TITLES)
            rows = tuple(TableRow(f"{name}: {row.title.strip()}", row.cells, row.unit) for row in found.rows)
            made.append(replace(found, rows=rows))
    if not made:
        return NotRun(results.scale_name)
    notes = tuple(dict.fromkeys(note for one in made for note in one.notes))
    return TableResult(made[0].columns, tuple(row for one in made for row in one.rows), notes)


@table("gaussws", "Power", "What each comparison of losses can tell")
def power(results: Results) -> Table:
    rows = []
    for family, arm, baseline, claim in COMPARED:
        part = chosen(results, FAMILIES[family])
        data = part if isinstance(part, NotRun) else compared(part, VALIDATION, arm, baseline)
        rows.append((Comparison(arm, baseline, margin(claim), (claim,), family), data))
    return power_table(rows, TITLES)


WIDTHS = {  # arms of the sweep that varies them
    OURS: "6 to 4 bits, λ = 1e-4",
    "8-to-6": "8 to 6 bits",
    "6-to-0": "6 to 0 bits",
    "lambda-0": "λ = 0",
    "lambda-100": "λ = 0.01",
    "same-rate": "at the rate and decay of weights",
    "no-decay": "without decay",
}


@table("gaussws", "Widths", "What bit widths depend on: where they begin, λ, and what the paper leaves open")
def widths(results: Results) -> Table:
    part = chosen(results, "widths")
    if isinstance(part, NotRun):
        return part
    ended = finals(part)
    mean = {key: one.mean for key, one in ended.items()}
    rows = []
    for arm, title in WIDTHS.items():
        shares = (share(part, {key: one.tiers[tier] for key, one in ended.items()}, arm) for tier in TIERS)
        rows.append(TableRow(title, (level(part, mean, arm), *shares, change(part, VALIDATION, arm))))
    columns = ("Mean bits", *(f"Up to {tier}, %" for tier in TIERS), "Validation loss, from BF16, %")
    return TableResult(columns, tuple(rows), ("Bits at the end, of GPT-2; shares of parameters",))


# -------------------------------------------------------------------------------- effects

ROWS = (  # sweep, its name, arms, what they are compared with
    ("gpt2", "GPT-2", (OURS, DIFFQ), BASELINE),
    ("gpt2", "GPT-2, low rate", ("gaussws-low", "diffq-low"), "bf16-low"),
    ("parts", "GPT-2, low rate", ("all", *PARTS), "bf16-low"),
    ("gpt2-mini", "GPT-2, Adam-mini", (MINI_OURS, MINI_DIFFQ), MINI),
    ("llama2", "Llama 2", (OURS, DIFFQ, "gaussws-8-6"), BASELINE),
    ("llama2-mini", "Llama 2, Adam-mini", (MINI_OURS, MINI_DIFFQ), MINI),
    ("large", "Llama 2, 1B", (OURS, DIFFQ, "gaussws-8-6"), BASELINE),
)
SHORT = {OURS: "GaussWS", MINI_OURS: "GaussWS", "gaussws-low": "GaussWS", "gaussws-8-6": "GaussWS, 8 to 6"} | {
    DIFFQ: "DiffQ",
    MINI_DIFFQ: "DiffQ",
    "diffq-low": "DiffQ",
}


@figure("gaussws", "Figure B", "Every arm's effect beside the noise")
def effects(results: Results) -> Picture:
    rows = measured(results)
    if not rows:
        return NotRun(results.scale_name)
    said = "Each arm beside BF16 of the same optimizer and rate; noise is GPT-2's; parts have a target of 0 bits."
    return forest(rows, (margin(claim) for claim in ("G8", "G9")), (said,))


def measured(results: Results) -> list[Effect]:
    found = []
    first = chosen(results, "gpt2")
    if isinstance(first, Results) and first.has(AGAIN):
        again = compared(first, LOSS, AGAIN)
        if not isinstance(again, NotRun):
            found.append(Effect(NOISE, again, None, "noise"))
    for sweep, group, arms, baseline in ROWS:
        part = chosen(results, sweep)
        for arm in arms:
            if isinstance(part, Results) and part.has(arm):
                pairs = compared(part, LOSS, arm, baseline)
                if not isinstance(pairs, NotRun):
                    found.append(Effect(f"{group}: {SHORT.get(arm, arm)}", pairs, None, group))
    return found
