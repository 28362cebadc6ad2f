"""Format numbers as text, and render Jinja templates for a report's page and for outputs of notebooks.

The page has the notebook's prose and results, without code; it loads no script, font or image.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fewbits.common.wording import plural

MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def anchor(name: str) -> str:
    """Convert a name to the form of HTML ids and file names, for example `Table 2` to `table-2`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def sentence(text: str) -> str:
    """Return the text with a capital letter at the start and a full stop at the end, if it has no end mark yet."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def decimals(value: float, error: float | None = None) -> int:
    """Return how many decimals show two significant digits of the error or, without an error, five of the value."""
    size, digits = (abs(error), 2) if error else (abs(value), 5)
    return max(0, min(8, digits - 1 - math.floor(math.log10(size)))) if size > 0 else 0


def number(value: float, places: int | None = None, *, sign: bool = False) -> str:
    """Return a number with `places` decimals or about five significant digits; from 10⁶ on, with a power of ten."""
    places = decimals(value) if places is None else places
    if abs(value) >= 1e6:
        mantissa, _, exponent = f"{value:{'+' if sign else ''}.3g}".partition("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(RAISED)}" if exponent else f"{value:,.0f}"
    else:
        value = round(value, places) + 0.0  # + 0.0 turns -0.0 into 0.0
        text = f"{value:{'+' if sign else ''},.{places}f}"
    return text.replace("-", MINUS).replace(",", THIN)


def effect(value: float, error: float | None, relative: bool, *, sign: bool = True) -> str:
    """Return an effect as text, in percent if it is relative, rounded to two significant digits of its error."""
    factor = 100 if relative else 1
    places = decimals(value * factor, error * factor if error else abs(value * factor) / 10 or None)
    return number(value * factor, places, sign=sign) + (f"{THIN}%" if relative else "")


def bounds(low: float, high: float, relative: bool, *, sign: bool = True) -> str:
    """Return an interval as the text `[low, high]`. relative, sign: as for `effect`."""
    factor, unit = (100, f"{THIN}%") if relative else (1, "")
    places = decimals(0.0, (high - low) / 2 * factor)
    return f"[{number(low * factor, places, sign=sign)}, {number(high * factor, places, sign=sign)}]{unit}"


def size(value: float, relative: bool) -> str:
    """Return a margin or a minimum detectable effect as text with two significant digits. relative: as for `effect`."""
    factor, unit = (100, f"{THIN}%") if relative else (1, "")
    return number(value * factor, decimals(0.0, value * factor)) + unit


# ------------------------------------------------------------------------------------------------ pages

PRIVATE = "application/vnd.fewbits.report+json"  # the MIME type of what a report takes from an output of its notebook
# The environment variable that asks for outputs with the MIME type PRIVATE: the folder of the report that is made.
ASKED = "FEWBITS_REPORT"
TEMPLATES = Path(__file__).with_name("templates")
_ROOT = Path(__file__).resolve().parents[2]


def render(template: str, **values: object) -> Markup:
    """Return the rendered template TEMPLATE.html. In the values, text is escaped and Markup is inserted unchanged."""
    return Markup(_environment().get_template(f"{template}.html").render(**values))


def page(title: str, cells: Iterable[tuple[str, str]], foot: Markup) -> str:
    """Return a report's HTML page. cells: (Markdown text, HTML of the outputs) of each cell; foot: the last text."""
    from markdown_it import MarkdownIt

    markdown, contents, body = MarkdownIt("commonmark").enable("table"), [], Markup()
    for text, html in cells:
        tokens = markdown.parse(text)
        for opening, inside in pairwise(tokens):
            if opening.type == "heading_open":
                opening.attrSet("id", anchor(inside.content))
                if opening.tag == "h2":
                    contents.append(inside.content)
        prose = Markup(markdown.renderer.render(tokens, markdown.options, {}))
        body += Markup('<div class="prose">{}</div>').format(prose) if prose else Markup()
        body += Markup(html)
    return document(title, body, contents, foot)


def document(title: str, body: Markup, contents: list[str], foot: Markup | str = "") -> str:
    """Return an HTML page. contents: the headings that the table of contents lists."""
    style = Markup(f"<style>{_sheet('page')}{_sheet('items')}</style>")
    return str(render("page", title=title, style=style, body=body, contents=contents, foot=foot)) + "\n"


def in_notebook(html: Markup) -> str:
    """Return the HTML for a notebook's output; its style sheet applies only inside this output."""
    rules = _sheet("items").replace(":root", "&")
    return f'<style>.fewbits {{ {rules} }}</style><div class="fewbits">{html}</div>'


def private(html: Markup, files: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Return {PRIVATE: what the report takes from an output}, or {} if no report is made. files: contents by path."""
    if ASKED not in os.environ:
        return {}
    contents = {name: one.encode() if isinstance(one, str) else one for name, one in files.items()}
    packed = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    return {PRIVATE: {"html": str(html), "files": packed}}


def link(file: str, text: str = "") -> Markup:
    """Return a link to a file of the report; if no report is being made, the path, or nothing if there is a text."""
    if ASKED not in os.environ:
        return Markup() if text else escape(file)
    return Markup('<a href="{}">{}</a>').format(file, text or file)


def published(study: str) -> str:
    """Return the address of the study's report in the checkout's gallery; "" if there is none."""
    pages = [
        page for scale in ("cpu-full", "cpu") if (page := _ROOT / f"docs/gallery/{study}-{scale}/index.html").is_file()
    ]
    return os.path.relpath(pages[0], report) if (report := os.environ.get(ASKED)) and pages else ""


@cache
def _sheet(name: str) -> str:
    return (TEMPLATES / f"{name}.css").read_text("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"anchor": anchor, "sentence": sentence}
    environment.globals |= {"plural": plural, "link": link}
    return environment
