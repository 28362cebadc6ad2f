"""Execute a notebook in percent format in this process.

A separate kernel would take two seconds to start and import torch again, so the cells run here as in Jupyter: in one
namespace, in order, and each shows the value of its last expression. Equal cells give equal files, since neither the
time nor the machine is recorded. An error in a cell is raised to the caller.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

PARAMETERS = "parameters"  # the tag of the cell whose values a caller can replace


@dataclass(frozen=True)
class Executed:
    """An executed notebook and the namespace of its cells."""

    notebook: NotebookNode
    names: dict[str, Any]


def execute(source: Path, parameters: Mapping[str, Any]) -> Executed:
    """Execute a notebook. parameters: the values of all variables in the cell with the tag `parameters`."""
    import jupytext

    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    _replace(notebook, source, parameters)
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = _run(cell.source, f"{source}, cell {number}", names, count)
    return Executed(notebook, names)


def _replace(notebook: NotebookNode, source: Path, parameters: Mapping[str, Any]) -> None:
    tagged = [cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{source}: {len(tagged)} cells have the tag {PARAMETERS}; exactly one must have it")
    (cell,) = tagged
    if set(parameters) != {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}:
        raise ValueError(f"{source}: the cell {PARAMETERS} must set exactly {', '.join(parameters)}")
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())


def _run(source: str, file: str, names: dict[str, Any], count: int) -> list[NotebookNode]:
    from nbformat.v4 import new_output

    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs = [new_output("stream", name="stdout", text=printed.getvalue())] if printed.getvalue() else []
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        outputs.append(new_output("execute_result", data=data, execution_count=count))
    return outputs
