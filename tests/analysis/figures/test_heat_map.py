"""Test that heat maps write the numbers of cells that have no colour, such as negative numbers."""

import math

import numpy as np
from matplotlib.collections import PatchCollection

from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure


def test_negative_numbers_are_written_without_a_shade() -> None:
    row = HeatRow("row", np.array([2.0, -3.0, 0.0, math.nan]))
    figure = heat_map_figure([HeatMap((row,), ("a", "b", "c", "d"), most=2.0, spell="{:g}".format)])
    (axes,) = figure.axes
    (shaded,) = (found for found in axes.collections if isinstance(found, PatchCollection))
    assert [text.get_text() for text in axes.texts] == ["2", "-3"]
    assert len(shaded.get_paths()) == 1
