"""Table 1, Figure 6, G16 and G18: what was timed on the device at hand, with the paper's A100 beside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fewbits.analysis import plots
from fewbits.analysis.cells import BLANK
from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.statistics import Interval
from fewbits.analysis.gaussws import benches
from fewbits.analysis.gaussws.arms import DIFFQ, OURS
from fewbits.analysis.gaussws.benches import PLAIN, Generators, Timed, Training, apart, lost, overhead
from fewbits.analysis.plots import LOOKS
from fewbits.analysis.registry import claim, figure, table
from fewbits.analysis.results import FigureResult, NotRun, Picture, Table, TableCell, TableResult, TableRow, Value
from fewbits.analysis.verdicts import Verdict, every, higher, no_worse, not_run, noted, out_of_reach
from fewbits.kernels.bench.generators import BITWISE, BOX_MULLER, TORCH

margin = paper("gaussws").margin
TURNS = "turns of one run, not seeds"
THREEFOLD = paper("gaussws").numbers["generator"].value
GIB, THOUSAND, PERCENT = 2**30, 1e3, 100.0
MODELS = {"134m": "llama2-134m", "1b": "llama2-1b", "3b": "llama2-3b", "70b": "llama2-70b-4l"}  # of Table 1's rows
COLUMNS = {  # of Table 1: optimizer and recipe
    "adamw": ("adamw", PLAIN),
    "adamw-gaussws": ("adamw", OURS),
    "adamw-diffq": ("adamw", DIFFQ),
    "adam-mini": ("adam-mini", PLAIN),
    "adam-mini-gaussws": ("adam-mini", OURS),
    "adam-mini-diffq": ("adam-mini", DIFFQ),
}
HOW = "what `fewbits bench train --store` measured last in this store; the paper's numbers are of an A100-40G"


# -------------------------------------------------------------------------------- Table 1


@table("gaussws", "Table 1")
def table_1(results: Results) -> Table:
    said, found = paper("gaussws").table("Table 1"), benches.training(results)
    if found is None:
        return NoData("not measured; fewbits bench train --store does it, and make reproduce-gaussws")
    missing = NotRun(results.scale_name)
    rows = []
    for row in said.rows:
        what, _, size = row.id.partition("-")
        cells = []
        for column in said.columns:
            value = said.value(row.id, column.id)
            ours = _of_paper(found, what, size, COLUMNS[column.id])
            blank = value is None and ours is None
            cells.append(BLANK if blank else TableCell(ours or missing, value, said.source, comparable=False))
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    rows += [row for name in found.models if name not in MODELS.values() for row in _own(found, name)]
    columns = tuple(column.heading for column in said.columns)
    notes = (
        f"Ours: {HOW}",
        f"{found.device}; {_steps(found)}",
        "Overhead: the share of throughput that is lost, the median over turns with its 95 % interval. Its mean over "
        "models is 1 less the geometric mean of what is left, as the paper's numbers have it; ours is over those timed",
        "Memory: on a CPU, tensors at the peak of a step, counted; the memory of the paper's runs is a GPU's",
    )
    return TableResult(columns, tuple(rows), notes)


def _steps(found: Training) -> str:
    sizes = {name: next(iter(of.values())).amount for name, of in found.models.items()}
    return ", ".join(f"{name} in steps of {tokens:,} tokens" for name, tokens in sizes.items())


def _of_paper(found: Training, what: str, size: str, place: tuple[str, str]) -> Value | None:
    if what == "overhead" and not size:
        return _mean_overhead(found, place)
    of = found.models.get(MODELS.get(size, ""), {})
    return _measured(of, what, place)


def _measured(of: dict[tuple[str, str], Timed], what: str, place: tuple[str, str]) -> Value | None:
    timed, plain = of.get(place), of.get((place[0], PLAIN))
    if timed is None:
        return None
    if what == "speed":
        return Value(timed.speed / THOUSAND, None, len(timed.seconds), ())
    if what == "memory":
        return None if timed.memory is None else Value(timed.memory / GIB, None, 0, ())
    if plain is None or place[1] == PLAIN:
        return None
    share, within = overhead(timed, plain)
    interval = within and Interval(PERCENT * within.low, PERCENT * within.high, within.level)
    return Value(PERCENT * share, interval, len(timed.seconds), ())


def _mean_overhead(found: Training, place: tuple[str, str]) -> Value | None:
    """1 − the geometric mean of throughput ratios, as the paper computes it."""
    kept = []
    for of in found.models.values():
        timed, plain = of.get(place), of.get((place[0], PLAIN))
        if timed is not None and plain is not None and place[1] != PLAIN:
            kept.append(1 - overhead(timed, plain)[0])
    return Value(PERCENT * (1 - math.prod(kept) ** (1 / len(kept))), None, len(kept), ()) if kept else None


def _own(found: Training, name: str) -> list[TableRow]:
    """Of a model that the paper has not."""
    titles = {"speed": (name, "10³ tokens/s"), "overhead": (f"Overhead of {name}", "%"), "memory": (name, "GiB")}
    rows = []
    for what, (title, unit) in titles.items():
        cells = [_measured(found.models[name], what, place) for place in COLUMNS.values()]
        rows.append(TableRow(f"{title} (ours)", tuple(BLANK if v is None else TableCell(v) for v in cells), unit))
    return rows


@claim("gaussws", "G16")
def g16(results: Results) -> Verdict:
    """Of Table 1's models on a GPU: the order, and that GaussWS costs no more and DiffQ no less than it did there."""
    found = benches.training(results)
    timed = {} if found is None or found.kind != "cuda" else found.models
    measured = {name: timed[name] for name in MODELS.values() if name in timed}
    if not measured:
        return noted(out_of_reach("of an A100; needs a GPU, and a bench of the paper's models on it"), *_beside(found))
    most, least = max(_papers("adamw-gaussws")), min(_papers("adamw-diffq"))
    parts: dict[str, Verdict] = {}
    for name, of in measured.items():
        plain, ours, diffq = (of.get(("adamw", recipe)) for recipe in (PLAIN, OURS, DIFFQ))
        parts |= {
            f"{name}, BF16 above GaussWS": higher(apart(plain, ours)),
            f"{name}, GaussWS above DiffQ": higher(apart(ours, diffq), margin("G16")),
            f"{name}, GaussWS loses {most:.2%} at most": no_worse(_beyond(ours, plain, most, 1), margin("G16")),
            f"{name}, DiffQ loses {least:.2%} at least": no_worse(_beyond(diffq, plain, least, -1), margin("G16")),
        }
    return noted(_timed(every(parts), found), *_beside(found), TURNS)


def _timed(verdict: Verdict, found: Training | Generators | None) -> Verdict:
    """No trial is behind it: its scale is the device, and what there are several of are the turns that arms took."""
    if found is None:
        return verdict
    parts = tuple((name, replace(part, unit="turn")) for name, part in verdict.parts)
    return replace(verdict, scale=found.device, unit="turn", parts=parts)


def _papers(column: str) -> list[float]:
    """Shares of throughput that Table 1 has lost, of its models."""
    said = [paper("gaussws").table("Table 1").value(f"overhead-{size}", column) for size in MODELS]
    return [value / PERCENT for value in said if value is not None]


def _beyond(ours: Timed | None, plain: Timed | None, bound: float, sign: int) -> Data:
    """The share of throughput that is lost, turn by turn: how far above the bound it is, or below for a sign of -1."""
    if ours is None or plain is None:
        return NoData("an arm was not measured")
    return Differences(tuple(sign * (one - bound) for one in lost(ours, plain)), True)


def _beside(found: Training | None) -> tuple[str, ...]:
    if found is None:
        return ()
    words = []
    for name, of in found.models.items():
        for recipe in (OURS, DIFFQ):
            timed, plain = of.get(("adamw", recipe)), of.get(("adamw", PLAIN))
            if timed is not None and plain is not None:
                share, within = overhead(timed, plain)
                between = f" ({within.low:.1%} to {within.high:.1%})" if within else ""
                words.append(f"{recipe} {share:.1%}{between} of {name}'s throughput")
    return (f"measured here ({found.device}), under AdamW: {', '.join(words)}",) if words else ()


# -------------------------------------------------------------------------------- Figure 6


LABELS = {BITWISE: "bitwise", BOX_MULLER: "Box–Muller", TORCH: "torch"}
PLACES = {BITWISE: 0, BOX_MULLER: 1, TORCH: 2}
TITLES = {"generator": "noise alone", "forward": "w + R · 2^(1−b) · max|w|"}


@figure("gaussws", "Figure 6")
def figure_6(results: Results) -> Picture:
    found = benches.generators(results)
    if found is None:
        return NoData("not measured; fewbits bench kernels --generators --store does it, and make reproduce-gaussws")

    def draw() -> Figure:
        picture, grid = plots.panels(2, 1, 4.6, sharex=True)
        for (axes,), what in zip(grid, TITLES, strict=True):
            for arm, place in PLACES.items():
                speeds = [of[what, arm].speed / 1e9 if (what, arm) in of else np.nan for of in found.shapes.values()]
                centres = np.arange(len(speeds)) + 0.27 * (place - 1)
                bars = axes.bar(centres, speeds, 0.25, color=LOOKS[place].shade)
                words = ["" if math.isnan(v) else f"{v:.2g}" for v in speeds]
                axes.bar_label(bars, words, fontsize=plots.SMALL - 1.4, padding=1)
            axes.set_title(f"{TITLES[what]}: 10⁹ elements/s")
            axes.grid(axis="x", visible=False)
        labels = [f"{rows}\n×{cols}" for rows, cols in found.shapes]
        grid[-1][0].set_xticks(range(len(labels)), labels)
        handles = [Patch(color=LOOKS[place].shade, label=LABELS[arm]) for arm, place in PLACES.items()]
        picture.legend(handles=handles, loc="outside upper left", ncols=3, borderpad=0.1)
        return picture

    notes = (
        f"{found.device}. Arms took turns; medians.",
        "The paper's figure is of the second kind, on GPUs, and its shapes are in its plot alone: ours go from its "
        "text's smallest weights to its largest. Box–Muller in the second needs a compiler that fuses it, on a GPU."
        + (" torch is given part of the larger matrices." if found.kind == "cpu" else ""),
    )
    return FigureResult(draw, (), notes)


@claim("gaussws", "G18")
def g18(results: Results) -> Verdict:
    found = benches.generators(results)
    if found is None:
        return not_run(results.scale_name)
    return noted(_timed(_faster(found), found), f"{TURNS}, on {found.device}; the paper's are GPUs")


def _faster(found: Generators) -> Verdict:
    """At every shape: beside Box–Muller by more than the margin; beside torch by more than threefold."""
    what = "forward" if found.kind == "cuda" else "generator"
    parts: dict[str, Verdict] = {}
    for (rows, cols), of in found.shapes.items():
        ours = of.get((what, BITWISE))
        beside = {
            "above Box–Muller": higher(apart(ours, of.get((what, BOX_MULLER))), margin("G18")),
            "above three times torch": higher(apart(ours, of.get((what, TORCH)), THREEFOLD)),
        }
        parts |= {f"{rows}×{cols}, {words}": verdict for words, verdict in beside.items()}
    return every(parts)
