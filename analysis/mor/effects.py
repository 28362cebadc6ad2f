"""Figure A: every arm's effect beside the noise, the margins and the paper's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fewbits.analysis import plots
from fewbits.analysis.frames import Results
from fewbits.analysis.mor.arms import AXIS, compared
from fewbits.analysis.mor.looks import (
    ABLATIONS,
    AGAIN,
    ARMS,
    BAD,
    BF16,
    PARTITIONS,
    SUB_TENSOR,
    Comparison,
    chosen,
    scale,
)
from fewbits.analysis.paper import paper
from fewbits.analysis.plots import SMALL
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.analysis.statistics import ALPHA, Interval, summary
from fewbits.analysis.verdicts import Differences, NoData

LOSS = "validation_loss"


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


@figure("mor", "Figure A", "Every arm's effect beside the noise")
def effects(results: Results) -> Picture:
    """Change of validation loss from BF16 with 90 % intervals; what BF16 differs from itself by; margins; the paper."""
    rows = measured(results)
    if not rows:
        return NotRun(scale(results))
    if all(row.mean is None for row in rows):
        return NoData("no pair of an arm and BF16 has ended")
    noise = next((row for row in rows if row.label == NOISE), None)
    margins = {paper("mor").claim(claim).margin for claim in ("M17", "M3")}
    lines = sorted(margin.value for margin in margins if margin is not None)

    def draw() -> Figure:
        picture, ((axes,),) = plots.panels(1, 1, 1.15 + 0.21 * len(rows))
        reach = _reach(rows, lines)
        axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6))
        for value in (*lines, *(-line for line in lines)):
            axes.axvline(value, color=plots.theme().quiet, linewidth=0.8, dashes=(2, 2), zorder=1)
        axes.axvline(0, color=plots.theme().text, linewidth=0.9, zorder=1)
        if noise is not None and noise.interval is not None:
            axes.axvspan(noise.interval.low, noise.interval.high, color=plots.theme().quiet, alpha=0.25, linewidth=0)
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
        theme = plots.theme()
        handles = [
            Line2D([], [], color=theme.text, marker="o", label="mean, 90 % interval"),
            plots.hollow("the paper's"),
            Rectangle((0, 0), 1, 1, facecolor=theme.quiet, alpha=0.25, label="A/A: BF16 again"),
            Line2D(
                [],
                [],
                color=theme.quiet,
                linewidth=0.8,
                dashes=(2, 2),
                label="margins, ± " + " and ".join(f"{100 * line:g}" for line in lines) + " %",
            ),
        ]
        picture.legend(handles=handles, loc="outside upper left", ncols=2, borderpad=0.1)
        return picture

    notes = [note for row in rows for note in row.notes]
    said = (
        "Each arm less BF16 of the same seed at the end of training, relative to BF16; the paper has one run of each "
        "arm. Arrows and triangles at an edge: beyond it. (2): configuration 2.",
    )
    trials = tuple(dict.fromkeys(i for row in rows for i in row.found.trials))
    return FigureResult(draw, trials, said + tuple(dict.fromkeys(notes)))


NOISE = "A/A: BF16 again"


def measured(results: Results) -> list[Effect]:
    """Of configuration 1 first, then of 2; each arm once, where it is run."""
    found: dict[str, Effect] = {}
    for configuration in ("1", "2"):
        for of in (PARTITIONS, ABLATIONS, SUB_TENSOR):
            part = chosen(results, of.sweep, configuration)
            if isinstance(part, NotRun):
                continue
            group = f"{of.sweep} {configuration}"
            suffix = "" if configuration == "1" else " (2)"
            column = Comparison(of.sweep, of.table, of.arms, configuration)
            own = ((a, ARMS[a].label) for a in of.arms if a != BF16)
            labels = ((AGAIN, NOISE), *own, (BAD, ARMS[BAD].label)) if of is PARTITIONS else tuple(own)
            for arm, label in labels:
                pairs = compared(results, LOSS, arm, where={AXIS: configuration})
                if not isinstance(pairs, NotRun) and label + suffix not in found:
                    said = column.paper_change(LOSS, arm) if arm in of.arms else None
                    found[label + suffix] = Effect(label + suffix, pairs, said, group)
    return list(found.values())


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
