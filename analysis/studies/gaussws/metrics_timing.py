"""Timings of training steps and of noise generators: Table 1, Figure 6, and the data of claims G16 and G18.

    fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs
    fewbits bench kernels --generators --store runs

The commands time arms in turns: one turn times each arm once, so that other load on the machine affects all alike.
Therefore arms are compared within a turn. A turn is quiet if other processes used little of the machine. A claim about
all models or shapes has to hold for each, so the number of a turn is that of the model or shape which is least
favourable to the claim. If fewer than half of the turns were quiet, there are no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.claims.hooks import measure
from fewbits.analysis.engine.results.data import Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Damaged, Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import not_planned
from fewbits.analysis.engine.statistics import Interval, median_interval
from fewbits.analysis.figures.panels import bar_figure
from fewbits.analysis.figures.theme import STYLES
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import figure, table
from fewbits.analysis.tables.cells import BLANK, PERCENT
from fewbits.common.store_folder import BENCH
from fewbits.experiments.bench.generators import BITWISE, BOX_MULLER, TORCH

DEVICES = ("cuda", "cpu")  # reports show the first device in this order that has measurements
PLAIN = "bf16"  # the recipe without quantization and noise
QUIET = 0.05  # a turn is quiet if other processes use at most this share of the processors
MODELS = {"134m": "llama2-134m", "1b": "llama2-1b", "3b": "llama2-3b", "70b": "llama2-70b-4l"}  # by size in Table 1
GENERATORS = {BITWISE: "bitwise", BOX_MULLER: "Box–Muller", TORCH: "torch"}
TITLES = {"generator": "noise alone", "forward": "w + R · 2^(1−b) · max|w|"}
GIB, THOUSAND, THREEFOLD = 2**30, 1e3, 3.0
COLUMNS = {  # by id of a column of Table 1, the optimizer and the recipe
    f"{optimizer}{f'-{recipe}' if recipe != PLAIN else ''}": (optimizer, recipe)
    for optimizer in ("adamw", "adam-mini")
    for recipe in (PLAIN, "gaussws", "diffq")
}
OWN = {  # by quantity, the title and the unit of a row of a model that the paper does not have
    "speed": ("{} (ours)", "10³ tokens/s"),
    "overhead": ("Overhead of {} (ours)", "%"),
    "memory": ("{} (ours)", "GiB"),
}


@dataclass(frozen=True)
class Timed:
    """The timings of one arm: an optimizer with a recipe, or a generator in one of the timed operations."""

    amount: int  # the number of tokens or elements that the arm processes in a turn
    seconds: tuple[float, ...]  # by turn
    others: tuple[float | None, ...] = ()  # by turn, the share of the processors that other processes used
    memory: int | None = None  # bytes at the peak of a training step

    @property
    def speed(self) -> float:
        return self.amount / median(self.seconds)

    def longer_than(self, other: Timed) -> list[float]:
        """Return by turn (this arm's time) / (the other's) − 1, where times are per token or element."""
        scale = other.amount / self.amount
        return [scale * a / b - 1 for a, b in zip(self.seconds, other.seconds, strict=True)]

    def lost_to(self, plain: Timed) -> list[float]:
        """Return by turn the share of the throughput of `plain` that this arm loses."""
        return [1 - 1 / (1 + longer) for longer in self.longer_than(plain)]


Arms = Mapping[tuple[str, str], Timed]  # by (optimizer, recipe), or by (timed operation, generator)


@dataclass(frozen=True)
class Bench:
    """The timings of one device."""

    device: str  # a description of the machine and of the measurement
    kind: str  # one of DEVICES
    timed: Mapping[Any, Arms]  # by name of the model, or by shape (rows, columns) of the matrix


def bench(results: Results, name: str) -> Bench | None:
    """Return the timings `train` (by model) or `generators` (by shape) of the first device that has them."""
    files = results.files.benches(results.plan)
    for kind in (kind for kind in DEVICES if f"{name}-{kind}" in files):
        found: dict[str, Any] = files[f"{name}-{kind}"]
        try:
            machine = found["machine"]
            processor, device = machine.get("processor") or machine.get("cpu") or "", str(machine["device"])
            named = device if processor in device else f"{processor}, {device}"
            where = f"{named}; {found['turns']} turns, load average {machine['load']:.1f} at the start"
            timed: dict[Any, dict[tuple[str, str], Timed]] = {}
            for one in found.get("models", ()):
                arms = timed.setdefault(one["model"], {})
                for row in one["rows"]:
                    arms[row["optimizer"], row["variant"]] = _timed(row, one["batch"] * one["length"])
            for one in found.get("timed", ()):
                timed.setdefault((one["rows"], one["cols"]), {})[one["what"], one["arm"]] = _timed(one, one["elements"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{BENCH}/{name}-{kind}.json is damaged ({type(error).__name__}: {error}): delete the file, and run "
                "`make reproduce-gaussws` to measure again"
            ) from None
        return Bench(where, kind, dict(timed))
    return None


def _timed(row: dict[str, Any], amount: int) -> Timed:
    return Timed(amount, tuple(row["seconds"]), tuple(row.get("others", ())), row.get("memory"))


def overhead(arms: Arms, optimizer: str, recipe: str) -> tuple[float, Interval | None] | None:
    """Return the share of BF16's throughput that a recipe loses, and its 95 % interval; None without timings."""
    ours, plain = arms.get((optimizer, recipe)), arms.get((optimizer, PLAIN))
    if recipe == PLAIN or ours is None or plain is None:
        return None
    shares = ours.lost_to(plain)
    return median(shares), median_interval(shares)


# -------------------------------------------------------------------------------- claims

Turns = Callable[[Timed, Timed], Sequence[float]]  # returns a value for each turn of an arm and its baseline


@measure("gaussws", "G16")
def g16(results: Results) -> Mapping[str, Measured]:
    """Return how much GaussWS and DiffQ slow the training of Table 1's models on a GPU.

    order-gaussws: (time of GaussWS) / (time of BF16) − 1. order-diffq: (time of DiffQ) / (time of GaussWS) − 1.
    gaussws-at-most: GaussWS's loss of throughput minus its greatest loss in Table 1. diffq-at-least: DiffQ's least loss
    in Table 1 minus its loss here.
    """
    found, printed = bench(results, "train"), paper("gaussws").table("Table 1")
    most, least = (
        choose(value / 100 for size in MODELS if (value := printed.value(f"overhead-{size}", column)) is not None)
        for choose, column in ((max, "adamw-gaussws"), (min, "adamw-diffq"))
    )
    cases: dict[str, tuple[Choose, str, str, Turns]] = {
        "order-gaussws": (min, "gaussws", PLAIN, Timed.longer_than),
        "order-diffq": (min, "diffq", "gaussws", Timed.longer_than),
        "gaussws-at-most": (max, "gaussws", PLAIN, lambda a, b: [x - most for x in a.lost_to(b)]),
        "diffq-at-least": (max, "diffq", PLAIN, lambda a, b: [least - x for x in a.lost_to(b)]),
    }
    models = [found.timed[name] for name in MODELS.values() if name in found.timed] if found else []
    if found is None or found.kind != "cuda" or not models:
        reason = "not measured; on a GPU, run `fewbits bench train --store` with Table 1's models"
        return dict.fromkeys(cases, NotPlanned(reason))
    return {
        name: _chosen(choose, models, ("adamw", ours), ("adamw", baseline), turns)
        for name, (choose, ours, baseline, turns) in cases.items()
    }


@measure("gaussws", "G18")
def g18(results: Results) -> Mapping[str, Measured]:
    """Return how much longer other generators take than the bitwise one: time / (factor · other time) − 1.

    box-muller: Box-Muller's time beside ours. torch, torch-box-muller: torch's time beside three times ours, and
    beside three times Box-Muller's. On a GPU the whole of eq. 3 is timed, as in the paper; on a CPU the generation of
    noise alone, since no CPU kernel computes eq. 3 with Box-Muller.
    """
    found = bench(results, "generators")
    cases = {
        "box-muller": (BOX_MULLER, BITWISE, 1.0),
        "torch": (TORCH, BITWISE, THREEFOLD),
        "torch-box-muller": (TORCH, BOX_MULLER, THREEFOLD),
    }
    if found is None:
        return dict.fromkeys(cases, NotPlanned("not measured; run `fewbits bench kernels --generators --store`"))
    what, shapes = "forward" if found.kind == "cuda" else "generator", found.timed.values()

    def beside(slow: str, fast: str, times: float) -> Measured:
        def turns(a: Timed, b: Timed) -> list[float]:
            return [(1 + longer) / times - 1 for longer in a.longer_than(b)]

        return _chosen(min, shapes, (what, slow), (what, fast), turns)

    return {name: beside(*case) for name, case in cases.items()}


Choose = Callable[[Iterable[float]], float]


def _chosen(
    choose: Choose, timed: Iterable[Arms], arm: tuple[str, str], baseline: tuple[str, str], turns: Turns
) -> Measured:
    """Return for each quiet turn the minimum or maximum (`choose`) over all models or shapes in `timed`.

    Models are timed separately, so the i-th quiet turns of all are combined.
    """
    kept: list[list[float]] = []
    for arms in timed:
        ours, other = arms.get(arm), arms.get(baseline)
        if ours is None or other is None:
            return NoData("an arm of the comparison was not measured")
        values, others = turns(ours, other), ours.others or (None,) * len(ours.seconds)
        quiet = [v for v, share in zip(values, others, strict=True) if share is not None and share <= QUIET]
        if 2 * len(quiet) < len(values):
            return NoData(
                f"disturbed: in {len(values) - len(quiet)} of {len(values)} turns other processes used more than "
                f"{QUIET:.0%} of the processors, or their use was not measured; measure again on an idle machine"
            )
        kept.append(quiet)
    values_by_turn = list(zip(*kept, strict=False))
    if not values_by_turn:
        return NoData("nothing was measured: there is no turn with timings")
    return Differences(tuple(map(choose, values_by_turn)), True, unit="turn")


# -------------------------------------------------------------------------------- Table 1, Figure 6


@table("gaussws", "Table 1")
def table_1(results: Results) -> Table:
    printed, found = paper("gaussws").table("Table 1"), bench(results, "train")
    if found is None:
        return NoData("not measured; run `fewbits bench train --store`, or `make reproduce-gaussws`")
    lines = [(row.title, row.unit, *row.id.partition("-")[::2], row.id) for row in printed.rows]
    own = [name for name in found.timed if name not in MODELS.values()]
    lines += [(title.format(name), unit, what, name, "") for name in own for what, (title, unit) in OWN.items()]

    def cell(column: str, what: str, size: str, row: str) -> TableCell:
        value = printed.value(row, column) if row else None
        arms, place = found.timed.get(MODELS.get(size, size), {}), COLUMNS[column]
        ours = _measured(arms, what, place) if size else _mean_overhead(found, place)
        if value is None and ours is None:
            return BLANK
        return TableCell(ours or not_planned(results), value, printed.source, comparable=False)

    names = [column.id for column in printed.columns]
    rows = [TableRow(title, tuple(cell(name, *of) for name in names), unit) for title, unit, *of in lines]
    amounts = {name: next(iter(of.values())).amount for name, of in found.timed.items()}
    notes = (
        "Ours: the last measurements of `fewbits bench train --store` in this store; the paper's are from an A100-40G",
        f"{found.device}; " + ", ".join(f"{name} in steps of {amount:,} tokens" for name, amount in amounts.items()),
        "Overhead: the share of throughput that is lost, as the median over turns with its 95 % interval; its mean is "
        "1 minus the geometric mean of the ratios, as in the paper, ours over the timed models",
        "Memory: on a CPU, the counted bytes of tensors at the peak of a step; the paper's is that of a GPU in a run "
        "sharded over eight",
    )
    return TableResult(tuple(column.heading for column in printed.columns), tuple(rows), notes)


def _measured(arms: Arms, what: str, place: tuple[str, str]) -> Value | None:
    """Return the speed, overhead or memory (`what`) of an arm in the table's unit; None if it was not measured."""
    timed = arms.get(place)
    if timed is None:
        return None
    if what == "speed":
        return Value(timed.speed / THOUSAND, None, len(timed.seconds))
    if what == "memory":
        return None if timed.memory is None else Value(timed.memory / GIB)
    share = overhead(arms, *place)
    return None if share is None else Value(*share, len(timed.seconds)).times(PERCENT)


def _mean_overhead(found: Bench, place: tuple[str, str]) -> Value | None:
    """Return 1 minus the geometric mean over models of (throughput of an arm) / (throughput of plain BF16)."""
    kept = [1 - one[0] for arms in found.timed.values() if (one := overhead(arms, *place)) is not None]
    return Value(1 - math.prod(kept) ** (1 / len(kept)), None, len(kept)).times(PERCENT) if kept else None


@figure("gaussws", "Figure 6")
def figure_6(results: Results) -> Picture:
    """Draw the number of elements per second that each noise generator computes, by shape of the matrix."""
    found = bench(results, "generators")
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

    part = [of[key].amount for (r, c), of in found.timed.items() for key in of if of[key].amount < r * c]
    notes = (
        f"{found.device}. Medians over turns; every arm was timed in each turn.",
        "The paper shows the quantity of the second panel, on GPUs, and its shapes only in the plot; ours range from "
        "the smallest to the largest weights in its text. In the second panel, Box–Muller needs a compiler that fuses "
        "it with the sum, so the panel has it on GPUs only.",
        *([f"Of larger matrices, torch computes at most {max(part):,} elements."] if part else []),
    )
    return FigureResult(draw, (), notes)
