"""Render the Jinja templates of analysis/views/templates/, for a report's page and for outputs of notebooks."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fewbits.analysis.views import numbers
from fewbits.common.wording import plural

PRIVATE = "application/vnd.fewbits.report+json"  # the MIME type of what a report takes from an output of its notebook
ASKED = "FEWBITS_REPORT"  # the environment variable that asks for outputs with the MIME type PRIVATE
TEMPLATES = Path(__file__).with_name("templates")


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
    packed = {name: base64.b64encode(_bytes(content)).decode() for name, content in files.items()}
    return {PRIVATE: {"html": str(html), "files": packed}}


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


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
    environment.globals["plural"] = plural
    return environment
