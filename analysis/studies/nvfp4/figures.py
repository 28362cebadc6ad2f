"""Figure 6, NVFP4 compared with MXFP4 and the tokens that MXFP4 needs to reach NVFP4's loss; Figure B, gradient errors.

Trials measure the relative errors of weight gradients during training (`metrics.gradient_errors`, for claim N7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import arm_table, family_places, not_planned, sweep_places
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure
from fewbits.analysis.figures.panels import ROW, Line, Panel, Rule, curve_figure
from fewbits.analysis.figures.series import means_with_band
from fewbits.analysis.figures.theme import BASELINE, STYLES, Style
from fewbits.analysis.figures.training import (
    ArmCurves,
    left_out,
    model_words,
    notes_of,
    panels_of,
    show_rows,
    trials_of,
)
from fewbits.analysis.report.items import FigureResult, Picture, why_missing
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.nvfp4.metrics import ERROR, LENGTHS, LOSS, gradient_errors
from fewbits.sweeps.planning.store import State

# -------------------------------------------------------------------------------- Figure 6

PRINTED = {"nvfp4": "nvfp4-8b", "mxfp4": "mxfp4-8b"}
ROWS = (
    ArmCurves("recipe", ("nvfp4", "mxfp4", "mxfp4-ocp"), name="{layers} blocks", paper=PRINTED),
    ArmCurves("hybrid", ("nvfp4", "mxfp4"), name="hybrid", metrics=("loss",), paper=PRINTED),
)
SWEEP, NVFP4 = "scratch", "nvfp4-whole"
MXFP4 = tuple(f"mxfp4-{times}" for times in LENGTHS)
TITLES = ("Final validation loss, nats", "Change from NVFP4, %")
TOKENS = "tokens of MXFP4 (NVFP4 = 1)"


@dataclass(frozen=True)
class Longer:
    """Trainings in MXFP4 with several numbers of tokens, compared with one number of tokens in NVFP4."""

    times: tuple[float, ...]  # by MXFP4 arm, its number of tokens divided by NVFP4's, in ascending order
    losses: pd.DataFrame  # by seed that all arms have finished and by arm (NVFP4 first), the final validation loss
    trials: tuple[str, ...]

    @property
    def changes(self) -> pd.DataFrame:
        """By seed and MXFP4 arm, the relative change of the loss from NVFP4's of the same seed."""
        base = self.losses[NVFP4]
        return self.losses.drop(columns=NVFP4).sub(base, axis=0).div(base.abs(), axis=0)

    @property
    def crossings(self) -> list[float]:
        """For each seed in which the change falls to 0, the interpolated `times` where it does."""
        found = (crossing(self.times, row) for row in self.changes.to_numpy(float).tolist())
        return [times for times in found if times is not None]


def longer(results: Results) -> Longer | NoData | NotPlanned:
    """Return the comparison of NVFP4 with MXFP4 at each number of tokens, or the reason why there is none."""
    part = sweep_places(results, SWEEP)
    if isinstance(part, NotPlanned):
        return part
    done = part.trials[part.trials["state"] == State.DONE]
    if LOSS not in done or not {NVFP4, *MXFP4[:1]} <= set(done["arm"]):
        return NoData("the sweep scratch has no finished trials of NVFP4 and MXFP4")
    losses = done.pivot_table(index="seed", columns="arm", values=LOSS)
    losses = losses[[NVFP4, *(arm for arm in MXFP4 if arm in losses)]].dropna()
    if losses.empty:
        return NoData("no seed of the sweep scratch is finished in all arms")
    tokens = part.curves("loss").groupby("arm")["tokens"].max()
    times = tuple(float(tokens[arm] / tokens[NVFP4]) for arm in losses.columns[1:])
    used = done["arm"].isin(losses.columns) & done["seed"].isin(losses.index)
    return Longer(times, losses, tuple(done.loc[used, "id"]))


def crossing(times: Sequence[float], changes: Sequence[float]) -> float | None:
    """Return at which multiple of tokens the change first falls to 0, interpolated linearly; None if it never does."""
    for (t, a), (u, b) in pairwise(zip(times, changes, strict=True)):
        if a > 0 >= b:
            return t + (u - t) * a / (a - b)
    return None


@figure("nvfp4", "Figure 6")
def figure_6(results: Results) -> Picture:
    """Draw losses and their changes from BF16; the last row shows MXFP4 trained on more tokens than NVFP4."""
    above, below = show_rows(results, "nvfp4", ROWS), longer(results)
    if not above and isinstance(below, NotPlanned):
        return below
    if not any(row.drawn for row in above) and not isinstance(below, Longer):
        return NoData("no curves of NVFP4 and MXFP4")

    def draw() -> Figure:
        rows = panels_of(above)
        if not isinstance(below, NotPlanned):
            rows.append(_longer_panels(below, above[0].style("nvfp4") if above else STYLES[0]))
        return curve_figure(rows, height=ROW * len(rows) + 0.6)

    more = below.trials if isinstance(below, Longer) else ()
    notes = (*notes_of(above), *left_out(results, ROWS), _in_words(below))
    return FigureResult(draw, tuple(dict.fromkeys((*trials_of(above), *more))), notes)


def _longer_panels(of: Longer | NoData, nvfp4: Style) -> list[Panel]:
    """Return the two panels of the last row: MXFP4's final losses, and their changes from NVFP4's (style: nvfp4)."""
    if not isinstance(of, Longer):
        return [Panel(title, y_label="from scratch", empty=why_missing(of)) for title in TITLES]

    def line(x: Sequence[float], found: pd.DataFrame, style: Style, points: bool) -> Line:
        means, band = means_with_band(found[arm] for arm in found)
        return Line(np.array(x), means, style, "", band, points=points)

    level = line([of.times[0], of.times[-1]], of.losses[[NVFP4, NVFP4]].set_axis([0, 1], axis=1), nvfp4, False)
    papers = paper("nvfp4").numbers["mxfp4-tokens"].value
    ring = Line(np.array([papers]), np.zeros(1), BASELINE, points=True, hollow=True)
    marks = [Rule(0, "text")]
    if of.crossings:
        marks.append(Rule(float(np.mean(of.crossings)), upright=True, dashes=(2, 2)))
    losses = line(of.times, of.losses.drop(columns=NVFP4), STYLES[1], True)
    changes = line(of.times, of.changes, STYLES[1], True)
    return [
        Panel(TITLES[0], (level, losses), x_label=TOKENS, y_label="from scratch"),
        Panel(TITLES[1], (changes, ring), tuple(marks), x_label=TOKENS, y_axis="change"),
    ]


def _in_words(of: Longer | NoData | NotPlanned) -> str:
    if not isinstance(of, Longer):
        return f"Longer training in MXFP4: {why_missing(of)}."
    seeds, crossings, already = len(of.losses), of.crossings, int((of.changes.iloc[:, 0] <= 0).sum())
    found = "its runs do not reach NVFP4's loss"
    if crossings:
        found = f"it reaches NVFP4's loss at {np.mean(crossings):.3g} times the tokens, interpolated linearly"
        found += f", in {len(crossings)} of {seeds} seeds" if len(crossings) < seeds else ""
    if already:
        met = f"in {already} of {seeds} seeds its loss is not above NVFP4's with the same number of tokens"
        found = f"{found}; {met}" if crossings or already < seeds else met
    return f"Longer training in MXFP4: {found}; the ring marks the paper's result, 1.36 times."


# -------------------------------------------------------------------------------- Figure B

# Labels of the parts of a block, in their order in the block.
PARTS = {"in": "in", "qkv": "QKV", "out": "out", "up": "up", "down": "down"}
PANELS = (  # sweep, arm, title
    ("layers", "nvfp4-base", "{layers} blocks, plain NVFP4"),
    ("recipe", "nvfp4-base", "{layers} blocks, plain NVFP4"),
    ("recipe", "nvfp4", "{layers} blocks, the whole recipe"),
    ("hybrid", "nvfp4", "hybrid, the whole recipe"),
)


@dataclass(frozen=True)
class Errors:
    """Relative errors of an arm's weight gradients at the end of training, means over seeds."""

    title: str
    table: pd.DataFrame  # by part (rows) and block (columns)
    trials: tuple[str, ...]  # ids
    seeds: int  # the number of seeds

    def heat_map(self, most: float, x_label: str) -> HeatMap:
        """Return the heat map of the arm; cells of layers that stay in high precision are empty."""
        table = self.table.reindex(columns=range(1, 1 + int(self.table.columns.to_numpy()[-1]))).fillna(0.0)
        rows = tuple(HeatRow(label, table.loc[part].to_numpy()) for part, label in PARTS.items() if part in table.index)
        return HeatMap(rows, tuple(map(str, table)), self.title, x_label, most, _in_percent)


def errors_of(results: Results, sweep: str, arm: str, title: str = "") -> Errors | NoData | NotPlanned:
    """Return the mean errors of weight gradients over an arm's finished trials, or the reason why there are none."""
    of, own = family_places(results, arm_table("nvfp4"), sweep), sweep_places(results, sweep)
    if isinstance(own, NotPlanned) or not of.has(arm):
        return not_planned(results)
    trials = of.trials[(of.trials["arm"] == arm) & (of.trials["state"] == State.DONE)]
    rows = gradient_errors(of).merge(trials[["id", "seed"]].drop_duplicates(), on="id")
    if rows.empty:
        return NoData(f"{model_words(own, title)}: no trial of {arm} is done and has measured gradients")
    table = rows.pivot_table(index="part", columns="block", values=ERROR)
    return Errors(model_words(own, title), table, tuple(dict.fromkeys(rows["id"])), rows["seed"].nunique())


@figure("nvfp4", "Figure B", "Where weight gradients err most")
def gradients(results: Results) -> Picture:
    """Draw a heat map for each arm: a cell is a linear layer, its shade the error of the layer's weight gradient."""
    found = [errors_of(results, *panel) for panel in PANELS]
    there = [one for one in found if isinstance(one, Errors)]
    missing = [one for one in found if isinstance(one, NoData)]
    if not there:
        return missing[0] if missing else not_planned(results)
    most = max(float(np.nanmax(one.table.to_numpy(float))) for one in there)

    def draw() -> Figure:
        labels = ["block, from the first" if one is there[-1] else "" for one in there]
        return heat_map_figure([one.heat_map(most, label) for one, label in zip(there, labels, strict=True)])

    seeds = sorted({one.seeds for one in there})
    notes = (
        "Norm of the gradient's change if the operands of a linear layer are quantized, in percent of the gradient's "
        f"norm; last window of training, mean over {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}. "
        "Empty cells: the layer stays in high precision.",
        *(f"{one.reason}." for one in missing),
    )
    return FigureResult(draw, tuple(dict.fromkeys(trial for one in there for trial in one.trials)), notes)


def _in_percent(value: float) -> str:
    return f"{100 * value:.0f}" if value >= 0.0095 else f"{100 * value:.1f}"
