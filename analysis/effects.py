"""A figure of every study: each arm's effect beside the noise, the margins and the paper's number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fewbits.analysis import plots
from fewbits.analysis.engine.data import Differences, NoData
from fewbits.analysis.engine.statistics import ALPHA, Interval, summary
from fewbits.analysis.plots import SMALL
from fewbits.analysis.results import FigureResult, Picture

LOSS = "validation_loss"
NOISE = "A/A: BF16 again"


@dataclass(frozen=True)
class Effect:
    """An arm's relative change of validation loss from BF16, over seeds."""

    label: str
    found: Differences | NoData
    paper: float | None = None
    group: str = ""

    @cached_property
    def mean(self) -> float | None:
        return float(np.mean(self.found.values)) if isinstance(self.found, Differences) and self.found.values else None

    @cached_property
    def interval(self) -> Interval | None:
        if isinstance(self.found, NoData) or not self.found.values:
            return None
        return summary(self.found.values, 1 - 2 * ALPHA, self.found.spread).interval

    @property
    def notes(self) -> tuple[str, ...]:
        return (self.found.reason,) if isinstance(self.found, NoData) else self.found.notes

    @property
    def words(self) -> str:
        """As text, right of the picture."""
        if self.mean is None:
            diverged = isinstance(self.found, Differences) and self.found.diverged
            return f"{diverged} diverged" if diverged else "no data"
        assert isinstance(self.found, Differences)
        value = f"{100 * self.mean:+.3f} %".replace("-", "−").replace("−0.000", "0.000").replace("+0.000", "0.000")
        return f"{value} · n = {len(self.found.values)}" + (f", {self.found.diverged} ✗" if self.found.diverged else "")


def forest(
    rows: Sequence[Effect], margins: Iterable[float], notes: tuple[str, ...] = (), *, widest: float | None = None
) -> Picture:
    """Change of validation loss from BF16 with 90 % intervals; what BF16 differs from itself by; margins; the paper.
    rows: one is labelled NOISE, where A/A is run. widest: the effect that the axis must hold, if not the margins."""
    if all(row.mean is None for row in rows):
        return NoData("no pair of an arm and BF16 has ended")
    noise = next((row for row in rows if row.label == NOISE), None)
    lines = sorted(set(margins))

    def draw() -> Figure:
        picture, ((axes,),) = plots.panels(1, 1, 1.15 + 0.21 * len(rows))
        reach = _reach(rows, lines) if widest is None else 1.15 * widest
        axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6))
        for value in (*lines, *(-line for line in lines)):
            axes.axvline(value, color=plots.theme().quiet, linewidth=0.8, dashes=(2, 2), zorder=1)
        axes.axvline(0, color=plots.theme().text, linewidth=0.9, zorder=1)
        band = None if noise is None else noise.interval
        if band is not None:
            axes.axvspan(band.low, band.high, color=plots.theme().quiet, alpha=0.25, linewidth=0)
        for y, row in enumerate(rows):
            _effect(axes, y, row, reach)
            if y and row.group != rows[y - 1].group:
                axes.axhline(y - 0.5, color=plots.theme().grid, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(False)
        axes.xaxis.set_major_formatter(plots.percent(signed=True))
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel("change of validation loss from BF16, %")
        picture.legend(handles=_key(rows, lines, band), loc="outside upper left", ncols=2, borderpad=0.1)
        return picture

    said = (
        "Each arm less BF16 of the same seed at the end of training, relative to BF16; the paper has one run of each "
        "arm. Arrows and triangles at an edge: beyond it.",
    )
    of_rows = dict.fromkeys(note for row in rows for note in row.notes)
    trials = tuple(dict.fromkeys(i for row in rows for i in row.found.trials))
    return FigureResult(draw, trials, said + notes + tuple(of_rows))


def _key(rows: Sequence[Effect], margins: Sequence[float], band: Interval | None) -> list[Line2D | Rectangle]:
    theme = plots.theme()
    ours = "mean, 90 % interval" if any(row.interval for row in rows) else "ours, one seed"
    words = "margins, ± " + " and ".join(f"{100 * margin:g}" for margin in margins) + " %"
    shaded = [Rectangle((0, 0), 1, 1, facecolor=theme.quiet, alpha=0.25, label=NOISE)] if band else []
    return [
        Line2D([], [], color=theme.text, marker="o", label=ours),
        plots.hollow("the paper's"),
        *shaded,
        Line2D([], [], color=theme.quiet, linewidth=0.8, dashes=(2, 2), label=words),
    ]


def _reach(rows: Sequence[Effect], margins: Sequence[float]) -> float:
    """Half the axis: the margins and all intervals of ours that are no more than twice as far; others get an arrow."""
    ours = [abs(v) for row in rows if row.mean is not None for v in (row.mean, *_ends(row))]
    return 1.15 * max([*margins, *(v for v in ours if v < 2 * max(margins))])


def _ends(row: Effect) -> tuple[float, ...]:
    return () if row.interval is None else (row.interval.low, row.interval.high)


def _effect(axes: Axes, y: int, row: Effect, reach: float) -> None:
    theme = plots.theme()
    axes.text(1.02, y, row.words, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
    if row.paper is not None:
        beyond = abs(row.paper) > reach
        marker = ("<" if row.paper < 0 else ">") if beyond else "o"
        x = float(np.clip(row.paper, -0.97 * reach, 0.97 * reach))
        axes.plot([x], [y], marker, mfc="none", mec=theme.quiet, ms=6, zorder=2)
    if row.mean is None:
        return
    if abs(row.mean) > reach:
        side = np.sign(row.mean)
        axes.annotate(
            "",
            (side * reach, y),
            (side * 0.9 * reach, y),
            arrowprops={"arrowstyle": "-|>", "color": theme.line, "linewidth": 1.2},
        )
        return
    if row.interval is not None:
        axes.plot(
            [max(row.interval.low, -reach), min(row.interval.high, reach)], [y, y], color=theme.text, linewidth=1.4
        )
    axes.plot([row.mean], [y], "o", color=theme.text, ms=4.5, zorder=3)
