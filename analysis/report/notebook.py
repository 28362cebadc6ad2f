"""Execute a notebook in percent format (a Python file with cells after `# %%`) in this process.

A separate kernel would take two seconds to start and would import torch again. The cells run as in Jupyter: in one
namespace, in order, and each shows the value of its last expression. Neither the time nor the machine is recorded, so
cells with the same results give the same notebook file. An error in a cell is raised to the caller.
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
    """A notebook after its cells have run."""

    notebook: NotebookNode  # the cells with their outputs
    names: dict[str, Any]  # the variables that the cells have set
    html: dict[str, Markup]  # by cell id, the HTML that the cell adds to the report's page


def execute(source: Path, parameters: Mapping[str, Any]) -> Executed:
    """Execute the notebook in the file `source`.

    parameters: new values of all variables that the cell with the tag `parameters` sets, by name, in the cell's order.
    """
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
    """Replace the values in the notebook's cell with the tag `parameters`; keep its type annotations and comments.

    The help of papermill (a tool that runs notebooks with other parameters) shows these annotations and comments.
    source: the notebook's file, for error messages. parameters: see `execute`.

    Raise ValueError if not exactly one cell has the tag, or if this cell does not set exactly these parameters in this
    order, each in a line of its own.
    """
    tagged = [cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{source}: {len(tagged)} cells have the tag {PARAMETERS}; exactly one must have it")
    (cell,) = tagged
    lines = [match for line in cell.source.split("\n") if (match := _ASSIGNMENT.fullmatch(line))]
    if [line["name"] for line in lines] != list(parameters) or len(lines) < len(cell.source.split("\n")):
        raise ValueError(
            f"{source}: the cell with the tag {PARAMETERS} must set {', '.join(parameters)}, in this order, each in a "
            "line of its own"
        )
    cell.source = "\n".join(f"{line['head']} {parameters[line['name']]!r}{line['about'] or ''}" for line in lines)


def _run(source: str, file: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Run a cell in the namespace `names`; return what it prints and the value of its last expression.

    The value is None if the cell does not end with an expression. file: the name of the cell in tracebacks.
    """
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
    """Yield the notebook outputs that Jupyter makes for a cell's value. count: the cell's execution count."""
    from nbformat.v4 import new_output

    if isinstance(value, Items):
        yield from (new_output("display_data", data=_bundle(item)) for item in value)
    elif value is not None:
        yield new_output("execute_result", data=_bundle(value), execution_count=count)


def _bundle(value: Any) -> dict[str, str]:
    if hasattr(value, "report_bundle"):
        return cast(dict[str, str], value.report_bundle())
    # The repr of a DataFrame depends on the width of the terminal, so the notebook stores the table's name instead.
    data = {"text/plain": f"<{value.report_name}>" if isinstance(value, ShownFrame) else repr(value)}
    return data | {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else data
