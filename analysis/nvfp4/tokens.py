"""Figure 6: NVFP4 beside MXFP4, and how many more tokens MXFP4 takes to NVFP4's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewbits.analysis import plots
from fewbits.analysis.curves import HEIGHT, LOSS, fill, notes, trials
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.statistics import ALPHA, Summary, summary
from fewbits.analysis.nvfp4.looks import Group, chosen
from fewbits.analysis.nvfp4.training import SIGNS, left_out, rows
from fewbits.analysis.plots import LOOKS
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.sweeps.running.store import State

LOSSES = (
    Group(
        "recipe",
        ("nvfp4", "mxfp4", "mxfp4-ocp"),
        name="6 blocks",
        said={"nvfp4": "nvfp4-8b", "mxfp4": "mxfp4-8b"},
    ),
    Group(
        "hybrid",
        ("nvfp4", "mxfp4"),
        name="hybrid",
        metrics=(LOSS,),
        said={"nvfp4": "nvfp4-8b", "mxfp4": "mxfp4-8b"},
    ),
)
SWEEP, NVFP4 = "scratch", "nvfp4-whole"
MXFP4 = ("mxfp4-1.00", "mxfp4-1.25", "mxfp4-1.36", "mxfp4-1.50")
FINAL = "validation_loss"


@dataclass(frozen=True)
class Longer:
    """MXFP4 trained for longer, beside NVFP4: of seeds that have ended of both."""

    times: tuple[float, ...]  # MXFP4's tokens over NVFP4's, in order
    levels: tuple[Summary, ...]  # final validation loss at each
    changes: tuple[Summary, ...]  # from NVFP4's, relative, seed by seed
    nvfp4: Summary
    crossings: tuple[float, ...]  # where a seed's changes pass zero, of seeds that do so
    already: int  # seeds in which as many tokens as NVFP4's are enough, so that there is nothing to pass
    seeds: int
    trials: tuple[str, ...]


def longer(results: Results) -> Longer | NoData | NotRun:
    part = chosen(results, SWEEP)
    if isinstance(part, NotRun):
        return part
    done = part.trials[part.trials["state"] == State.DONE]
    if FINAL not in done or not {NVFP4, *MXFP4[:1]} <= set(done["arm"]):
        return NoData("no NVFP4 and MXFP4 of the sweep scratch have ended")
    tokens = part.curves("loss").groupby("arm")["tokens"].max()
    losses = done.pivot_table(index="seed", columns="arm", values=FINAL)
    arms = [arm for arm in MXFP4 if arm in losses]
    table = losses[[NVFP4, *arms]].dropna()
    if table.empty:
        return NoData("no seed of the sweep scratch has ended in every arm")
    changes = table[arms].sub(table[NVFP4], axis=0).div(table[NVFP4].abs(), axis=0)
    times = tuple(float(tokens[arm] / tokens[NVFP4]) for arm in arms)
    where = [crossing(times, row) for row in changes.to_numpy(float).tolist()]
    return Longer(
        times,
        tuple(summary(table[arm], 1 - 2 * ALPHA) for arm in arms),
        tuple(summary(changes[arm], 1 - 2 * ALPHA) for arm in arms),
        summary(table[NVFP4], 1 - 2 * ALPHA),
        tuple(x for x in where if x is not None),
        int((changes[arms[0]] <= 0).sum()),
        len(table),
        tuple(done.loc[done["arm"].isin([NVFP4, *arms]), "id"]),
    )


def crossing(times: Sequence[float], changes: Sequence[float]) -> float | None:
    """Where changes first pass from above zero to it or below, on straight lines between them."""
    for (t, a), (u, b) in pairwise(zip(times, changes, strict=True)):
        if a > 0 >= b:
            return t + (u - t) * a / (a - b)
    return None


@figure("nvfp4", "Figure 6")
def figure_6(results: Results) -> Picture:
    """Losses and their changes, as the other figures of curves; below them those of longer trainings in MXFP4."""
    above, below = rows(LOSSES, results), longer(results)
    if not above and isinstance(below, NotRun):
        return below
    if not any(row.there for row in above) and not isinstance(below, Longer):
        return NoData("no curve of NVFP4 and MXFP4")

    def draw() -> Figure:
        picture, grid = plots.panels(len(above) + 1, 2, HEIGHT * (len(above) + 1) + 0.6)
        fill(picture, grid[: len(above)], above)
        last = grid[-1]
        last[0].set_ylabel("from nothing")
        if isinstance(below, Longer):
            _losses(last[0], below)
            _changes(last[1], below)
        else:
            for axes, title in zip(last, TITLES, strict=True):
                axes.set_title(title)
                plots.instead(axes, str(below) if isinstance(below, NotRun) else "no data")
        return picture

    said = (*notes(above), *left_out(LOSSES, results), _in_words(below), SIGNS)
    more = below.trials if isinstance(below, Longer) else ()
    return FigureResult(draw, tuple(dict.fromkeys((*trials(above), *more))), said)


TITLES = ("Final validation loss, nats", "Change from NVFP4, %")


def _losses(axes: Axes, of: Longer) -> None:
    axes.set_title(TITLES[0])
    level = of.nvfp4
    axes.axhline(level.mean, color=LOOKS[0].shade, dashes=LOOKS[0].dashes, linewidth=1.3)
    if level.interval is not None:
        axes.axhspan(level.interval.low, level.interval.high, color=LOOKS[0].shade, alpha=0.13, linewidth=0)
    _points(axes, of.times, of.levels)
    axes.set_xlabel("tokens of MXFP4, NVFP4's = 1")


def _changes(axes: Axes, of: Longer) -> None:
    axes.set_title(TITLES[1])
    axes.axhline(0, color=LOOKS[0].shade, dashes=LOOKS[0].dashes, linewidth=1.3)
    _points(axes, of.times, of.changes)
    axes.plot([paper("nvfp4").numbers["mxfp4-tokens"].value], [0], "o", mfc="none", mec=plots.theme().text, ms=8)
    if of.crossings:
        axes.axvline(float(np.mean(of.crossings)), color=plots.theme().quiet, linewidth=0.9, dashes=(2, 2))
    axes.yaxis.set_major_formatter(plots.percent(signed=True))
    axes.set_xlabel("tokens of MXFP4, NVFP4's = 1")


def _points(axes: Axes, times: Sequence[float], found: Sequence[Summary]) -> None:
    intervals = [one.interval for one in found if one.interval is not None]
    band = (np.array([i.low for i in intervals]), np.array([i.high for i in intervals])) if intervals else None
    means = np.array([one.mean for one in found])
    plots.curve(axes, LOOKS[1], np.array(times), means, band, points=True, apart=False)


def _in_words(of: Longer | NoData | NotRun) -> str:
    if isinstance(of, NotRun):
        return f"MXFP4 for longer: {of}."
    if isinstance(of, NoData):
        return f"MXFP4 for longer: {of.reason}."
    said = "its runs do not meet NVFP4's loss"
    if of.crossings:
        said = f"it meets NVFP4's loss at {np.mean(of.crossings):.3g} times the tokens, on straight lines between runs"
        said += f", in {len(of.crossings)} of {of.seeds} seeds" if len(of.crossings) < of.seeds else ""
    if of.already:
        met = f"in {of.already} of {of.seeds} seeds it is not above NVFP4's loss with as many tokens"
        said = f"{said}; {met}" if of.crossings or of.already < of.seeds else met
    return f"MXFP4 for longer: {said}; in the paper at 1.36 times, the ring."
