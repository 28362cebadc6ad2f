"""An executed notebook as one HTML page that needs nothing beside it: no script, no font, no picture from elsewhere.

What is shown is prose and results; the code of the cells is in the notebook beside the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from markupsafe import Markup

from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import anchor

if TYPE_CHECKING:
    from nbformat import NotebookNode


def page(notebook: NotebookNode, title: str, foot: str) -> str:
    """Return the notebook's page."""
    contents: list[str] = []
    body = Markup().join(_parts(notebook, contents))
    return document(title, body, contents, foot)


def document(title: str, body: Markup, contents: list[str], foot: str) -> str:
    """Return a page. contents: the names of its parts, each of which is a heading."""
    return str(render("page", title=title, body=body, contents=contents, foot=foot)) + "\n"


def _parts(notebook: NotebookNode, contents: list[str]) -> Iterator[Markup]:
    """Yield what each cell shows, and add the headings to contents."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            tokens = markdown.parse(cell.source)
            for opening, inside in pairwise(tokens):
                if opening.type == "heading_open":
                    opening.attrSet("id", anchor(inside.content))
                    if opening.tag == "h2":
                        contents.append(inside.content)
            html = Markup(markdown.renderer.render(tokens, markdown.options, {}))
            yield Markup('<div class="prose">{}</div>').format(html)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                yield Markup("<pre>{}</pre>").format(output.text)
            elif "text/html" in output.data:
                yield Markup(output.data["text/html"])
            else:
                yield Markup("<pre>{}</pre>").format(output.data["text/plain"])
