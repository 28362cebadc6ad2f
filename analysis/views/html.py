"""Render the Jinja templates of analysis/views/templates/, for a report's page and for outputs of notebooks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fewbits.analysis.views import numbers
from fewbits.common.wording import plural

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
