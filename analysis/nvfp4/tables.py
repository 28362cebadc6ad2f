"""NVFP4's Tables 1 to 5: the paper's numbers beside ours.

Speed-ups are of tensor cores, and what is trained here computes in BF16 and FP32: ours are the bits that formats take,
counted in the kernels' own encodings. Task scores need models of billions of parameters; losses stand in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from fewbits.analysis.arms import BASELINE, having, ids
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.nvfp4.arms import part
from fewbits.analysis.outcomes import STAND_INS, Column, outcomes
from fewbits.analysis.registry import table
from fewbits.analysis.results import NotRun, OutOfReach, Setting, TableCell, TableResult, TableRow
from fewbits.kernels.packed import encode
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import parameters

SPEED = OutOfReach("formats are emulated in BF16 and FP32, no tensor core computes in them")
ENCODINGS = {  # of Table 1's rows; either element format of a row takes as many bits
    "mxfp8": "e4m3:1x32:e8m0",
    "mxfp6": "e3m2:1x32:e8m0",
    "mxfp4": "e2m1:1x32:e8m0",
    "nvfp4": "e2m1:1x16:nvfp4",
}
SIDE = 1024  # of the matrix that is encoded


@cache
def bits(spec: str) -> float:
    """That an element takes as it lies in memory, scales included."""
    return encode(torch.zeros(SIDE, SIDE), spec).bits_per_element


@table("nvfp4", "Table 1")
def table_1(results: Results) -> TableResult:
    said = paper("nvfp4").table("Table 1")
    rows = []
    for row in said.rows:
        each = bits(ENCODINGS[row.id])
        cells = [TableCell(SPEED, value, row.source or said.source) for value in row.values]
        cells += [TableCell(Setting(f"{each:.4g}", ())), TableCell(Setting(f"{16 / each:.2f}", ()))]
        rows.append(TableRow(row.title, tuple(cells)))
    columns = (*(f"{column.title}, ×" for column in said.columns), "Bits an element", "BF16's over these")
    notes = (f"Bits are counted in the packed encoding of a matrix of {SIDE}×{SIDE}, all scales included",)
    return TableResult(columns, tuple(rows), notes)


@table("nvfp4", "Table 2")
def table_2(results: Results) -> TableResult:
    """The paper's beside our hybrids, the family of its 12B model."""
    columns = []
    for title, sweep in (("Hybrid", "hybrid"), ("Transformer", "recipe")):
        of = part(results, sweep)
        in_paper = {"fp8": "fp8", "nvfp4": "nvfp4"} if sweep == "hybrid" else {}
        columns += [
            Column(f"{title}: FP8", "fp8", said=in_paper.get("fp8"), of=of),
            Column(f"{title}: NVFP4", "nvfp4", baseline="fp8", said=in_paper.get("nvfp4"), of=of),
            Column(f"{title}: BF16", BASELINE, baseline="fp8", of=of),
        ]
    notes = (
        "The paper's task scores are of its 12B model after 10 T tokens. Losses of ours are of other models, data and "
        "tokens: what compares is each arm's change from FP8, paired by seed; ± is a 95 % interval",
    )
    stand_ins = {"Validation loss": "validation_loss", **STAND_INS}
    return outcomes(results, paper("nvfp4").table("Table 2"), columns, notes, beside="FP8", stand_ins=stand_ins)


# -------------------------------------------------------------------------------- architectures

Fact = Callable[[DecoderConfig], str]
FACTS: Mapping[str, Fact] = {  # of the paper's rows
    "layers": lambda model: f"{model.layers}",
    "width": lambda model: f"{model.width}",
    "ffn": lambda model: f"{model.ffn}",
    "head_dim": lambda model: f"{model.head_dim}",
    "heads": lambda model: f"{model.heads}",
    "kv_heads": lambda model: f"{model.kv_heads}",
    "state": lambda model: f"{model.mamba_state}",
    "groups": lambda model: f"{model.mamba_groups}",
}
MORE: Mapping[str, Fact] = {  # what else tells a model
    "Order of blocks": lambda model: model.pattern or f"{model.layers} × attention and FFN",
    "Vocabulary": lambda model: f"{model.vocab:,}",
    "Parameters, M": lambda model: f"{parameters(model) / 1e6:,.1f}",
}


@table("nvfp4", "Table 3")
def table_3(results: Results) -> TableResult:
    return _architecture(results, "Table 3", "hybrid-12b", "hybrid")


@table("nvfp4", "Table 4")
def table_4(results: Results) -> TableResult:
    return _architecture(results, "Table 4", "hybrid-8b", "hybrid")


@table("nvfp4", "Table 5")
def table_5(results: Results) -> TableResult:
    return _architecture(results, "Table 5", "nvfp4-1.2b", "recipe")


def _architecture(results: Results, name: str, registered: str, sweep: str) -> TableResult:
    """The paper's model beside ours of that name, and what was trained in its place."""
    said, whole, (trained, trials) = paper("nvfp4").table(name), MODELS[registered], _trained(results, sweep)

    def cells(fact: Fact, value: float | None, source: str) -> tuple[TableCell, ...]:
        ours = NotRun(results.scale_name) if trained is None else Setting(fact(trained), trials)
        return TableCell(Setting(fact(whole), ()), value, source), TableCell(ours)

    rows = [TableRow(row.title, cells(FACTS[row.id], row.values[0], row.source or said.source)) for row in said.rows]
    rows += [TableRow(title, cells(fact, None, "")) for title, fact in MORE.items()]
    return TableResult((f"{registered}", "Trained at this scale"), tuple(rows))


def _trained(results: Results, sweep: str) -> tuple[DecoderConfig | None, tuple[str, ...]]:
    """The model of the sweep's BF16 arm."""
    of = part(results, sweep)
    if having(of, BASELINE) is None:
        return None, ()
    trials = tuple(ids(of, BASELINE).values())
    return results.plan.trials[trials[0]].trial.model, trials
