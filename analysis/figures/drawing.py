"""Draw schematics of boxes, arrows and text. Coordinates and lengths are in points, from the lower left corner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from fewbits.analysis.figures.theme import SMALL, TEXT, WIDTH, theme

POINTS = 72 * WIDTH  # the width of a drawing in points
FORMATS = ("E4M3", "E5M2", "BF16")  # the formats for which themes have fills
E4M3, E5M2, BF16 = range(3)  # indices into FORMATS and Theme.formats


class Drawing:
    """A figure to draw in, POINTS wide. height: in points."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height / 72))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, POINTS), ylim=(0, height))
        self.axes.axis("off")
        self.height = height

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        at: str = "left",
        bold: bool = False,
        quiet: bool = False,
        size: float = SMALL,
        color: str = "",
        **options: Any,
    ) -> None:
        """Write text whose left end, center or right end (`at`) is at x, and whose vertical middle is at y.

        size: in points. color: as #rrggbb; if empty, the theme's text colour, or its quiet colour if `quiet`. options:
        those of Axes.text.
        """
        ink = color or (theme().quiet if quiet else theme().text)
        options = {"va": "center", "weight": "bold" if bold else "normal"} | options
        self.axes.text(x, y, words, ha=at, color=ink, fontsize=size, **options)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        *,
        fill: Any = "none",
        edge: str = "",
        line: float = 0.9,
        **options: Any,
    ) -> None:
        """Draw a rectangle with the text `words` in its middle.

        x, y: the lower left corner. fill: a colour of matplotlib. edge: the name of a colour of the theme; without it,
        no outline is drawn. line: the width of the outline. options: those of `text`.
        """
        colour = getattr(theme(), edge) if edge else "none"
        width_of_line = line if edge else 0
        self.axes.add_patch(
            Rectangle((x, y), width, height, facecolor=fill, edgecolor=colour, linewidth=width_of_line, zorder=2)
        )
        if words:
            self.text(x + width / 2, y + height / 2, words, at="center", va="center_baseline", zorder=3, **options)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, style: str = "-|>", edge: str = "quiet"
    ) -> None:
        """Draw an arrow. style: an arrow style of matplotlib; edge: the name of a colour of the theme."""
        self.axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle=style, mutation_scale=7, color=getattr(theme(), edge), linewidth=0.9, zorder=1
            )
        )

    def line(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Draw a line in the theme's quiet colour through these points."""
        self.axes.plot(xs, ys, color=theme().quiet, linewidth=0.8)

    def format_key(self, formats: Sequence[int], y: float) -> None:
        """Draw a legend of the fills of these formats (indices into FORMATS) in a row at height y."""
        for i, one in enumerate(formats):
            self.box(10 + 62 * i, y - 5, 12, 10, fill=theme().formats[one])
            self.text(27 + 62 * i, y, FORMATS[one])


__all__ = ["BF16", "E4M3", "E5M2", "FORMATS", "POINTS", "SMALL", "TEXT", "Drawing"]
