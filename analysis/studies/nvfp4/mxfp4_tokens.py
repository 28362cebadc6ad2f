"""Figure 6: NVFP4 compared with MXFP4, and the tokens that MXFP4 needs to reach NVFP4's loss."""

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
from fewbits.analysis.engine.results.places import sweep_places
from fewbits.analysis.engine.statistics import ALPHA, summary
from fewbits.analysis.figures.curves import ROW, Line, Panel, Rule, curve_figure
from fewbits.analysis.figures.series import band_of, means_of
from fewbits.analysis.figures.theme import BASELINE, STYLES, Style
from fewbits.analysis.figures.training import ArmCurves, left_out, notes_of, panels_of, show_rows, trials_of
from fewbits.analysis.report.items import FigureResult, Picture, why_missing
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.nvfp4.metrics import LENGTHS, LOSS
from fewbits.sweeps.planning.store import State

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
    """Return the multiple of NVFP4's tokens at which the change of MXFP4's loss from NVFP4's first falls to 0.

    times: MXFP4's numbers of tokens divided by NVFP4's, in ascending order. changes: the change of the loss at each
    of them; between them, it is interpolated linearly. Return None if the change never falls from above 0 to 0.
    """
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
        means = [summary(found[arm], 1 - 2 * ALPHA) for arm in found]
        return Line(np.array(x), means_of(means), style, "", band_of(means), points=points)

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
