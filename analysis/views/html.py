"""Render the Jinja templates of analysis/views/templates/, for a report's page and for outputs of notebooks."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fewbits.analysis.views import numbers
from fewbits.common.wording import plural

PRIVATE = "application/vnd.fewbits.report+json"  # the MIME type of what a report takes from an output of its notebook
# The environment variable that asks for outputs with the MIME type PRIVATE: the folder of the report that is made.
ASKED = "FEWBITS_REPORT"
TEMPLATES = Path(__file__).with_name("templates")
_ROOT = Path(__file__).resolve().parents[2]


def render(template: str, **values: object) -> Markup:
    """Return the rendered template TEMPLATE.html. In the values, text is escaped and Markup is inserted unchanged."""
    return Markup(_environment().get_template(f"{template}.html").render(**values))


def style() -> Markup:
    """Return a <style> element with the style sheets of a report's page."""
    return Markup(f"<style>{_sheet('page')}{_sheet('items')}</style>")


def in_notebook(html: Markup) -> str:
    """Return the HTML for a notebook's output; its style sheet applies only inside this output."""
    rules = _sheet("items").replace(":root", "&")
    return f'<style>.fewbits {{ {rules} }}</style><div class="fewbits">{html}</div>'


def private(html: Markup, files: Mapping[str, str | bytes]) -> dict[str, Any]:
    """Return {PRIVATE: what the report takes from an output}; {} if no report is being made.

    files: contents by path in the report's folder.
    """
    if ASKED not in os.environ:
        return {}
    contents = {name: one.encode() if isinstance(one, str) else one for name, one in files.items()}
    packed = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    return {PRIVATE: {"html": str(html), "files": packed}}


def link(file: str, text: str = "") -> Markup:
    """Return a link to a file of the report; if no report is being made, the file's path.

    text: replaces the path; without a report nothing is shown then.
    """
    if ASKED not in os.environ:
        return Markup() if text else escape(file)
    return Markup('<a href="{}">{}</a>').format(file, text or file)


def repository(path: str = "") -> str:
    """Return the address of the repository, or of a file in it; "" if the package's metadata do not name one."""
    urls = dict(one.split(", ", 1) for one in metadata("fewbits").get_all("Project-URL") or ())
    address = urls.get("Repository", "")
    return f"{address}/blob/HEAD/{path}" if address and path else address


def published(study: str) -> str:
    """Return the address of the study's published report at scale cpu, in the checkout or else in the repository."""
    page = f"docs/gallery/{study}-cpu/index.html"
    if (report := os.environ.get(ASKED)) and (_ROOT / page).is_file():
        return os.path.relpath(_ROOT / page, report)
    return repository(page)


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
    environment.filters |= {"anchor": numbers.anchor, "sentence": numbers.sentence}
    environment.globals |= {"plural": plural, "link": link, "repository": repository}
    return environment
