"""Run a report's notebook in a Jupyter kernel, and turn its outputs into one self-contained HTML page.

The notebook lies beside `results.parquet`, which its cells read. Each output brings its HTML and files for the report
under a private MIME type, which is removed from the stored notebook. The page has the notebook's prose and results,
without code; it loads no script, font or image.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from markupsafe import Markup

from fewbits.analysis.engine.results.archive import NAME
from fewbits.analysis.views.html import ASKED, PRIVATE, render, style
from fewbits.analysis.views.numbers import anchor

if TYPE_CHECKING:
    from nbformat import NotebookNode

LONGEST = 1800  # seconds for one cell


@dataclass(frozen=True)
class Executed:
    """A notebook after its cells have run in a kernel."""

    notebook: NotebookNode  # the cells with their outputs, without the private ones
    html: dict[str, Markup]  # by cell id, the HTML that the cell adds to the report's page
    files: dict[str, bytes]  # the report's files that outputs have brought, by path


def execute(source: Path, archive: bytes, report: Path) -> Executed:
    """Execute a notebook in percent format in a kernel, in a folder that contains the archive.

    report: the folder in which the page will lie. Raise ValueError if a cell fails.
    """
    import jupytext
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    with TemporaryDirectory() as folder:
        (Path(folder) / NAME).write_bytes(archive)
        client = NotebookClient(
            notebook,
            timeout=LONGEST,
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute(env={**os.environ, ASKED: str(report), "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
        except CellExecutionError as error:
            raise ValueError(f"{source}: {error.ename}: {error.evalue}") from None
    html: dict[str, Markup] = {}
    files: dict[str, bytes] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if (brought := output.get("data", {}).pop(PRIVATE, None)) is not None:
                html[cell.id] = html.get(cell.id, Markup()) + Markup(brought["html"])
                files |= {name: base64.b64decode(content) for name, content in brought["files"].items()}
    return Executed(notebook, html, files)


def page(executed: Executed, title: str, foot: Markup) -> str:
    """Return the HTML page of an executed notebook. foot: the text at the end of the page."""
    contents: list[str] = []
    body = Markup().join(_parts(executed, contents))
    return document(title, body, contents, foot)


def document(title: str, body: Markup, contents: list[str], foot: Markup | str) -> str:
    """Return an HTML page. contents: the headings that the table of contents lists."""
    return str(render("page", title=title, style=style(), body=body, contents=contents, foot=foot)) + "\n"


def _parts(executed: Executed, contents: list[str]) -> Iterator[Markup]:
    """Yield the HTML of each cell's text or outputs, and append the second-level headings to `contents`."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    for cell in executed.notebook.cells:
        if cell.cell_type == "markdown":
            tokens = markdown.parse(cell.source)
            for opening, inside in pairwise(tokens):
                if opening.type == "heading_open":
                    opening.attrSet("id", anchor(inside.content))
                    if opening.tag == "h2":
                        contents.append(inside.content)
            html = Markup(markdown.renderer.render(tokens, markdown.options, {}))
            yield Markup('<div class="prose">{}</div>').format(html)
        yield executed.html.get(cell.id, Markup())


def stored(notebook: NotebookNode) -> str:
    """Return an executed notebook as the content of an .ipynb file, without what cells have written to stderr."""
    import nbformat

    for cell in notebook.cells:
        if outputs := cell.get("outputs"):
            cell.outputs = [one for one in outputs if one.output_type != "stream" or one.name != "stderr"]
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook)) + "\n"
