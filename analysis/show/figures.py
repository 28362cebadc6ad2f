"""A figure of the registry: drawn once for each theme, and shown in the reader's."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from fewbits.analysis.results import FigureResult
from fewbits.analysis.show.markup import boxed, tag

PIXELS = 120  # that an inch of a figure takes where there is room


@dataclass(frozen=True)
class Drawn:
    """A figure as files."""

    light: str  # SVG
    dark: str
    png: bytes  # light
    width: float  # inches


def drawn(picture: FigureResult) -> Drawn:
    from fewbits.analysis.plots import png, svg, themed  # matplotlib takes its time

    light, dark = themed(picture, "light"), themed(picture, "dark")
    for figure in (light, dark):
        figure.set_layout_engine("none")  # it is laid out by now: that takes longer than all the rest
    return Drawn(svg(light), svg(dark), png(light), float(light.get_figwidth()))


def picture(figure: Drawn, told: str) -> str:
    """told: what those hear who do not see it. The theme is the browser's choice, on the page and in Jupyter alike."""
    dark = tag("source", media="(prefers-color-scheme: dark)", srcset=_uri(figure.dark)).removesuffix("</source>")
    width = f"width: {figure.width * PIXELS:.0f}px"
    light = tag("img", src=_uri(figure.light), alt=told, style=width).removesuffix("</img>")
    return boxed(tag("picture", dark, light))


def _uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
