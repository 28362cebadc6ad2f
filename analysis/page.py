"""An executed notebook as one HTML page that needs nothing beside it: no script, no font, no picture from elsewhere.

What is shown is prose and results; the code of the cells is in the notebook that lies beside the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from fewbits.analysis.show.markup import anchor, tag, words

if TYPE_CHECKING:
    from nbformat import NotebookNode

HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
SCHEMES = '<meta name="color-scheme" content="light dark">'


def page(notebook: NotebookNode, title: str, foot: str) -> str:
    contents: list[str] = []
    body = "".join(_parts(notebook, contents))
    return document(title, body, contents, foot)


def document(title: str, body: str, contents: list[str], foot: str) -> str:
    """contents: the names of the parts, each of which is the heading of its own."""
    links = (tag("li", tag("a", words(name), href=f"#{anchor(name)}")) for name in contents)
    nav = tag("nav", tag("ol", *links), aria_label="Contents") if contents else ""
    head = tag("head", HEAD, SCHEMES, tag("title", words(title)))
    shown = tag("body", nav, tag("main", body, tag("footer", tag("p", foot))))
    return "<!doctype html>\n" + tag("html", head, shown, lang="en") + "\n"


def _parts(notebook: NotebookNode, contents: list[str]) -> Iterator[str]:
    """What each cell shows. To contents go the headings on the way."""
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
            yield tag("div", markdown.renderer.render(tokens, markdown.options, {}), class_="prose")
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                yield tag("pre", words(output.text))
            elif "text/html" in output.data:
                yield output.data["text/html"]
            else:
                yield tag("pre", words(output.data["text/plain"]))
