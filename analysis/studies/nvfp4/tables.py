"""NVFP4's Tables 1 to 5: the paper's numbers and ours.

The paper's speed-ups are of tensor cores, but our training emulates formats in BF16 and FP32. Therefore Table 1 shows
the bits that each format takes in the kernels' encodings instead of our speed-ups. Task scores need models of billions
of parameters; Table 2 has our losses instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from fewbits.analysis.engine.results.arms import BASELINE, arm_table
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import family_places, not_planned, trial_ids
from fewbits.analysis.report.items import OutOfReach, Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.tables.losses import STAND_INS, LossColumn, loss_table
from fewbits.kernels.packed import encode
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import parameters

SPEED = OutOfReach("formats are emulated in BF16 and FP32, so no tensor core computes in them")
# A quantizer for each row of Table 1; for a row with two element formats of equally many bits, one of them is used.
ENCODINGS = {
    "mxfp8": "e4m3:1x32:e8m0",
    "mxfp6": "e3m2:1x32:e8m0",
    "mxfp4": "e2m1:1x32:e8m0",
    "nvfp4": "e2m1:1x16:nvfp4",
}
SIDE = 1024  # the side of the encoded matrix


@cache
def bits(spec: str) -> float:
    """Return the bits per element, including all scales, of a matrix that is encoded by the quantizer `spec`."""
    return encode(torch.zeros(SIDE, SIDE), spec).bits_per_element


@table("nvfp4", "Table 1")
def table_1(results: Results) -> TableResult:
    """Return the paper's speed-ups, and the bits per element of our encodings."""
    printed = paper("nvfp4").table("Table 1")
    rows = []
    for row in printed.rows:
        each = bits(ENCODINGS[row.id])
        cells = [TableCell(SPEED, value, row.source or printed.source) for value in row.values]
        cells += [TableCell(Setting(f"{each:.4g}")), TableCell(Setting(f"{16 / each:.2f}"))]
        rows.append(TableRow(row.title, tuple(cells)))
    columns = (*(f"{column.title}, ×" for column in printed.columns), "Bits per element", "BF16's 16 bits over these")
    notes = (f"Bits are counted in the packed encoding of a {SIDE}×{SIDE} matrix, including all scales",)
    return TableResult(columns, tuple(rows), notes)


@table("nvfp4", "Table 2")
def table_2(results: Results) -> TableResult:
    """Return the task scores of the paper's 12B hybrid with the losses of our hybrids and transformers."""
    columns = []
    for title, sweep, ids in (("Hybrid", "hybrid", ("fp8", "nvfp4")), ("Transformer", "recipe", (None, None))):
        part = family_places(results, arm_table("nvfp4"), sweep)
        columns += [
            LossColumn(f"{title}: FP8", "fp8", printed=ids[0], part=part),
            LossColumn(f"{title}: NVFP4", "nvfp4", baseline="fp8", printed=ids[1], part=part),
            LossColumn(f"{title}: BF16", BASELINE, baseline="fp8", part=part),
        ]
    notes = (
        "The paper's task scores are of its 12B model after 10 T tokens. Our losses are of other models, data and "
        "numbers of tokens, so only each arm's change from FP8, paired by seed, can be compared; ± is a 95 % interval",
    )
    stand_ins = {"Validation loss": "validation_loss", **STAND_INS}
    printed = paper("nvfp4").table("Table 2")
    return loss_table(results, printed, columns, notes, baseline="FP8", stand_ins=stand_ins)


# -------------------------------------------------------------------------------- architectures

Fact = Callable[[DecoderConfig], str]
# The field of DecoderConfig by the id of a row of the paper's tables, if the two names differ.
ATTRIBUTES = {"state": "mamba_state", "groups": "mamba_groups"}
MORE: Mapping[str, Fact] = {  # further rows: facts of a model that the paper's tables do not have
    "Order of blocks": lambda model: model.pattern or f"{model.layers} × attention and FFN",
    "Vocabulary": lambda model: f"{model.vocab:,}",
    "Parameters, M": lambda model: f"{parameters(model) / 1e6:,.1f}",
}


def _attribute(row: str) -> Fact:
    return lambda model: str(getattr(model, ATTRIBUTES.get(row, row)))


def architecture(results: Results, name: str, preset: str, sweep: str) -> TableResult:
    """Return a table of a model's settings: our preset of the paper's model, and the smaller model of this scale.

    The preset's column also has the paper's numbers. name: the table's id. preset: the preset's name. sweep: a sweep
    whose arm BF16 trains the model of this scale.
    """
    printed, whole = paper("nvfp4").table(name), MODELS[preset]
    trials = tuple(trial_ids(family_places(results, arm_table("nvfp4"), sweep), BASELINE).values())
    trained = results.plan.trials[trials[0]].trial.model if trials else None

    def cells(fact: Fact, value: float | None, source: str) -> tuple[TableCell, ...]:
        ours = not_planned(results) if trained is None else Setting(fact(trained), trials)
        return TableCell(Setting(fact(whole)), value, source), TableCell(ours)

    rows = [
        TableRow(row.title, cells(_attribute(row.id), row.values[0], row.source or printed.source))
        for row in printed.rows
    ]
    rows += [TableRow(title, cells(fact, None, "")) for title, fact in MORE.items()]
    return TableResult((preset, "Trained at this scale"), tuple(rows))


for _name, _preset, _sweep in (
    ("Table 3", "hybrid-12b", "hybrid"),
    ("Table 4", "hybrid-8b", "hybrid"),
    ("Table 5", "nvfp4-1.2b", "recipe"),
):
    table("nvfp4", _name)(partial(architecture, name=_name, preset=_preset, sweep=_sweep))
