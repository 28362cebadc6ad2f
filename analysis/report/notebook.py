"""Execute a notebook in percent format in this process.

A separate kernel would take two seconds to start and import torch again, so the cells run here as in Jupyter: in one
namespace, in order, and each shows the value of its last expression. Equal cells give equal files, since neither the
time nor the machine is recorded. An error in a cell is raised to the caller.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from markupsafe import Markup

from fewbits.analysis.views.shown_frame import Items, ShownFrame

if TYPE_CHECKING:
    from nbformat import NotebookNode

_ASSIGNMENT = re.compile(r"(?P<head>(?P<name>\w+)\b.*?=) .*?(?P<about>  # .*)?")
PARAMETERS = "parameters"  # the tag of the cell whose values a caller can replace


@dataclass(frozen=True)
class Executed:
    """An executed notebook: its cells' namespace and, by the ids of cells, the HTML that they add to the page."""

    notebook: NotebookNode
    names: dict[str, Any]
    html: dict[str, Markup]


def execute(source: Path, parameters: Mapping[str, Any]) -> Executed:
    """Execute a notebook. parameters: the values of all variables in the cell with the tag `parameters`."""
    import jupytext

    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    _replace(notebook, source, parameters)
    names: dict[str, Any] = {"__name__": "__main__"}
    html: dict[str, Markup] = {}
    count = 0
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            printed, value = _run(cell.source, f"{source}, cell {number}", names)
            cell.outputs = [*_stream(printed), *_shown(value, count)]
            if hasattr(value, "report_html"):
                html[cell.id] = value.report_html
    return Executed(notebook, names, html)


def _replace(notebook: NotebookNode, source: Path, parameters: Mapping[str, Any]) -> None:
    """Replace the values of the tagged cell, and keep its annotations and comments, which papermill's help shows."""
    tagged = [cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{source}: {len(tagged)} cells have the tag {PARAMETERS}; exactly one must have it")
    (cell,) = tagged
    lines = [match for line in cell.source.split("\n") if (match := _ASSIGNMENT.fullmatch(line))]
    if [line["name"] for line in lines] != list(parameters) or len(lines) < len(cell.source.split("\n")):
        raise ValueError(f"{source}: the cell {PARAMETERS} must set {', '.join(parameters)}, each in a line of its own")
    cell.source = "\n".join(f"{line['head']} {parameters[line['name']]!r}{line['about'] or ''}" for line in lines)


def _run(source: str, file: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Run a cell; return what it prints and the value of its last expression."""
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    return printed.getvalue(), value


def _stream(printed: str) -> Iterator[NotebookNode]:
    from nbformat.v4 import new_output

    if printed:
        yield new_output("stream", name="stdout", text=printed)


def _shown(value: Any, count: int) -> Iterator[NotebookNode]:
    """Yield the outputs for a cell's value, as Jupyter makes them."""
    from nbformat.v4 import new_output

    if isinstance(value, Items):
        yield from (new_output("display_data", data=_bundle(item)) for item in value)
    elif value is not None:
        yield new_output("execute_result", data=_bundle(value), execution_count=count)


def _bundle(value: Any) -> dict[str, str]:
    if hasattr(value, "report_bundle"):
        return cast(dict[str, str], value.report_bundle())
    # The text of a frame depends on the width of the terminal, so the notebook has a frame's name instead
    data = {"text/plain": f"<{value.report_name}>" if isinstance(value, ShownFrame) else repr(value)}
    return data | {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else data
