"""NVFP4's Tables 1 to 5: the paper's numbers and ours.

The paper's speed-ups are of tensor cores. Our training emulates formats in BF16 and FP32, so Table 1 has no speed-ups
of ours; it shows elements, scales, blocks and bits of the kernels' encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import BASELINE, arm_table, family_places, not_planned, trial_ids
from fewbits.analysis.report.items import Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import table
from fewbits.analysis.tables.cells import STAND_INS, LossColumn, loss_table
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.scalings import SCALINGS
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import parameters

# The quantizers of each row of Table 1; the first one is encoded, since both elements of a row have equally many bits.
ENCODINGS = {
    "mxfp8": ("e5m2:1x32:e8m0", "e4m3:1x32:e8m0"),
    "mxfp6": ("e3m2:1x32:e8m0", "e2m3:1x32:e8m0"),
    "mxfp4": ("e2m1:1x32:e8m0",),
    "nvfp4": ("e2m1:1x16:nvfp4",),
}
SIDE = 1024  # the side of the encoded matrix


@cache
def bits(spec: str) -> float:
    """Return the bits per element, including all scales, of a matrix that is encoded by the quantizer `spec`."""
    return encode(torch.zeros(SIDE, SIDE), spec).bits_per_element


@table("nvfp4", "Table 1")
def table_1(results: Results) -> TableResult:
    """Return the formats' elements, scales and blocks, in the paper and in our kernels, and the paper's speed-ups."""
    printed = paper("nvfp4").table("Table 1")
    rows = []
    for row in printed.rows:
        quantizers = [Quantizer.parse(spec) for spec in ENCODINGS[row.id]]
        stored, title = SCALINGS[quantizers[0].scaling].stored, row.title.partition(": ")
        ours = (
            " or ".join(str(q.format).upper() for q in quantizers),
            ("U" if stored is not None and not stored.signed else "") + str(stored).upper(),
            str(quantizers[0].block.cols),
        )
        cells = [TableCell(Setting(text), said) for text, said in zip(ours, title[2].split("; "), strict=True)]
        cells += [TableCell(Setting("not measured"), value, row.source or printed.source) for value in row.values]
        rows.append(TableRow(title[0], (*cells, TableCell(Setting(f"{bits(ENCODINGS[row.id][0]):.4g}")))))
    speeds = (f"Speed-up, {column.title}, ×" for column in printed.columns)
    notes = (
        "Speed-ups are over BF16. Ours are not measured: formats are emulated in BF16 and FP32, so no tensor core "
        f"computes in them. Bits are counted in the packed encoding of a {SIDE}×{SIDE} matrix, including all scales",
    )
    return TableResult(("Element", "Scale", "Block", *speeds, "Bits per element"), tuple(rows), notes)


@table("nvfp4", "Table 2")
def table_2(results: Results) -> TableResult:
    """Return the task scores of the paper's 12B hybrid, beside our 12B or else hybrid, and the losses of our models."""
    columns: list[LossColumn] = []
    for title, sweep in (("12B", "large"), ("Hybrid", "hybrid"), ("Transformer", "recipe")):
        part = family_places(results, arm_table("nvfp4"), sweep)
        if sweep == "large" and not part.members:
            continue
        fp8, nvfp4 = ("", "") if sweep == "recipe" or columns else ("fp8", "nvfp4")
        columns += [
            LossColumn(f"{title}: FP8", "fp8", printed=fp8 or None, part=part),
            LossColumn(f"{title}: NVFP4", "nvfp4", baseline="fp8", printed=nvfp4 or None, part=part),
        ]
        columns += [] if sweep == "large" else [LossColumn(f"{title}: BF16", BASELINE, baseline="fp8", part=part)]
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


def architecture(results: Results, name: str, preset: str, sweeps: tuple[str, ...]) -> TableResult:
    """Return a table of settings: our preset beside the paper's numbers, and this scale's model, of the first sweep."""
    printed, whole = paper("nvfp4").table(name), MODELS[preset]
    parts = (family_places(results, arm_table("nvfp4"), sweep) for sweep in sweeps)
    part = next((one for one in parts if one.members), results.of_places(()))
    trials = tuple((trial_ids(part, BASELINE) or trial_ids(part, "fp8")).values())
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


for _name, _preset, _sweeps in (
    ("Table 3", "hybrid-12b", ("large", "hybrid")),
    ("Table 4", "hybrid-8b", ("hybrid",)),
    ("Table 5", "nvfp4-1.2b", ("recipe",)),
):
    table("nvfp4", _name)(partial(architecture, name=_name, preset=_preset, sweeps=_sweeps))
