"""Helpers that read tables and figures in tests: a table by id, its cells, and whether a figure is cut at its edges."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.report.items import Setting, TableCell, TableResult, Value
from fewbits.analysis.report.registry import study_registry


def table(study: str, name: str, of: Results) -> TableResult:
    entry = study_registry(study).tables[name]
    made = entry.make(of)
    assert isinstance(made, TableResult)
    made.frame()
    return made


def cell(made: TableResult, row: str, column: str) -> TableCell:
    (found,) = (r for r in made.rows if r.title == row)
    return found.cells[made.columns.index(column)]


def mean(of: TableCell) -> float:
    assert isinstance(of.ours, Value), of.ours
    return of.ours.mean


def text(of: TableCell) -> str:
    assert isinstance(of.ours, Setting)
    return of.ours.text


def reaches_over(figure: Figure) -> bool:
    """Tell whether anything in the figure is more than half a point (1/144 inch) outside its edges."""
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    beyond = (-box.x0, -box.y0, box.x1 - figure.get_figwidth(), box.y1 - figure.get_figheight())
    return max(beyond) > 0.5 / 72
