"""Turn an executed notebook into one self-contained HTML page, without external scripts, fonts or images.

The page has the notebook's prose and results, without the code of its cells. A table with an input field for
the reader (`TableResult.control`) has an inline script; a browser that runs no scripts shows all cells of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from markupsafe import Markup

from fewbits.analysis.report.notebook import Executed
from fewbits.analysis.views.html import render, style
from fewbits.analysis.views.numbers import anchor


def page(executed: Executed, title: str, foot: str) -> str:
    """Return the HTML page of an executed notebook. foot: the text at the end of the page."""
    contents: list[str] = []
    body = Markup().join(_parts(executed, contents))
    return document(title, body, contents, foot)


def document(title: str, body: Markup, contents: list[str], foot: str) -> str:
    """Return an HTML page. contents: the headings that the table of contents lists; foot: the text at the end."""
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
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                yield Markup("<pre>{}</pre>").format(output.text)
            elif cell.id not in executed.html:
                yield Markup("<pre>{}</pre>").format(output.data["text/plain"])
        yield executed.html.get(cell.id, Markup())
