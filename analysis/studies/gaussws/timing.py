"""Make GaussWS's Table 1 (training steps) and Figure 6 (noise generators) from this store's timings.

The paper's timings are of an A100.
"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import not_planned
from fewbits.analysis.figures.bars import bar_figure
from fewbits.analysis.figures.theme import STYLES
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import figure, table
from fewbits.analysis.studies.gaussws import benches
from fewbits.analysis.studies.gaussws.benches import PLAIN, Arms, Bench, overhead
from fewbits.analysis.studies.gaussws.metrics_timing import MODELS
from fewbits.analysis.tables.cells import BLANK, PERCENT
from fewbits.experiments.bench.generators import BITWISE, BOX_MULLER, TORCH

GIB, THOUSAND = 2**30, 1e3
COLUMNS = {  # by id of a column of Table 1, the optimizer and the recipe
    f"{optimizer}{f'-{recipe}' if recipe != PLAIN else ''}": (optimizer, recipe)
    for optimizer in ("adamw", "adam-mini")
    for recipe in (PLAIN, "gaussws", "diffq")
}
MEASURED = "the last measurements of `fewbits bench train --store` in this store; the paper's are from an A100-40G"


@table("gaussws", "Table 1")
def table_1(results: Results) -> Table:
    """Return the paper's table of throughput, overhead and memory with our measurements."""
    printed, found = paper("gaussws").table("Table 1"), benches.training(results)
    if found is None:
        return NoData("not measured; run `fewbits bench train --store`, or `make reproduce-gaussws`")
    missing = not_planned(results)
    rows = []
    for row in printed.rows:
        what, _, size = row.id.partition("-")
        cells = []
        for column in printed.columns:
            value, place = printed.value(row.id, column.id), COLUMNS[column.id]
            if what == "overhead" and not size:
                ours = _mean_overhead(found, place)
            else:
                ours = _measured(found.timed.get(MODELS.get(size, ""), {}), what, place)
            blank = value is None and ours is None
            cells.append(BLANK if blank else TableCell(ours or missing, value, printed.source, comparable=False))
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    rows += [row for name in found.timed if name not in MODELS.values() for row in _own_rows(found, name)]
    steps = ", ".join(
        f"{name} in steps of {next(iter(of.values())).amount:,} tokens" for name, of in found.timed.items()
    )
    notes = (
        f"Ours: {MEASURED}",
        f"{found.device}; {steps}",
        "Overhead: the share of throughput that is lost, as the median over turns with its 95 % interval. The mean "
        "overhead is 1 minus the geometric mean of the models' throughput ratios, as in the paper; our mean is over "
        "the timed models",
        "Memory: on a CPU, the counted bytes of tensors at the peak of a step; the paper's numbers are a GPU's memory",
    )
    return TableResult(tuple(column.heading for column in printed.columns), tuple(rows), notes)


def _measured(arms: Arms, what: str, place: tuple[str, str]) -> Value | None:
    """Return a measured number of one arm, in the table's unit; None if it was not measured.

    what: speed, overhead or memory. place: the optimizer and the recipe.
    """
    timed = arms.get(place)
    if timed is None:
        return None
    if what == "speed":
        return Value(timed.speed / THOUSAND, None, len(timed.seconds))
    if what == "memory":
        return None if timed.memory is None else Value(timed.memory / GIB)
    lost = overhead(arms, *place)
    return None if lost is None else Value(*lost, len(timed.seconds)).times(PERCENT)


def _mean_overhead(found: Bench[str], place: tuple[str, str]) -> Value | None:
    """Return 1 minus the geometric mean over models of (throughput of an arm) / (throughput of plain BF16).

    The paper computes the mean overhead in this way. place: the optimizer and the recipe of the arm.
    """
    kept = [1 - lost[0] for arms in found.timed.values() if (lost := overhead(arms, *place)) is not None]
    return Value(1 - math.prod(kept) ** (1 / len(kept)), None, len(kept)).times(PERCENT) if kept else None


def _own_rows(found: Bench[str], name: str) -> list[TableRow]:
    """Return rows of speed, overhead and memory for a model that the paper's table does not have."""
    titles = {"speed": (name, "10³ tokens/s"), "overhead": (f"Overhead of {name}", "%"), "memory": (name, "GiB")}
    rows = []
    for what, (title, unit) in titles.items():
        cells = [_measured(found.timed[name], what, place) for place in COLUMNS.values()]
        rows.append(TableRow(f"{title} (ours)", tuple(BLANK if v is None else TableCell(v) for v in cells), unit))
    return rows


# -------------------------------------------------------------------------------- Figure 6

GENERATORS = {BITWISE: "bitwise", BOX_MULLER: "Box–Muller", TORCH: "torch"}
TITLES = {"generator": "noise alone", "forward": "w + R · 2^(1−b) · max|w|"}


@figure("gaussws", "Figure 6")
def figure_6(results: Results) -> Picture:
    """Draw the number of elements per second that each noise generator computes, by shape of the matrix."""
    found = benches.generators(results)
    if found is None:
        return NoData("not measured; run `fewbits bench kernels --generators --store`, or `make reproduce-gaussws`")

    def draw() -> Figure:
        shapes = [f"{rows}\n×{columns}" for rows, columns in found.timed]
        speeds = {
            f"{title}: 10⁹ elements/s": {
                name: [of[what, arm].speed / 1e9 if (what, arm) in of else np.nan for of in found.timed.values()]
                for arm, name in GENERATORS.items()
            }
            for what, title in TITLES.items()
        }
        return bar_figure(shapes, speeds, dict(zip(GENERATORS.values(), STYLES, strict=False)))

    notes = (
        f"{found.device}. Medians over turns; every arm was timed in each turn.",
        "The paper's figure shows the quantity of the second panel on GPUs. The paper shows its shapes only in the "
        "plot; ours range from the smallest to the largest weights in the paper's text. In the second panel, "
        "Box–Muller needs a compiler that fuses it with the sum, so the panel has it on GPUs only."
        + (" For the larger matrices, torch is timed on a part of the elements." if found.kind == "cpu" else ""),
    )
    return FigureResult(draw, (), notes)
