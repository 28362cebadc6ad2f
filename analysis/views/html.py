"""Render Jinja templates with autoescape, and wrap HTML so that notebook cells can show it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fewbits.analysis.views import numbers

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, repr=False)
class Html:
    """HTML that a notebook shows; a terminal shows its name instead."""

    text: Markup
    name: str

    def _repr_html_(self) -> str:
        return str(self.text)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def render(template: str, **values: object) -> Markup:
    """Return the rendered template; text in the values is escaped, Markup is not."""
    return Markup(_environment().get_template(f"{template}.html").render(**values))


def style() -> Markup:
    """Return the style sheet of all pages as an HTML element."""
    return Markup(f"<style>{(TEMPLATES / 'style.css').read_text('utf-8')}</style>")


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
    environment.globals["plural"] = numbers.plural
    return environment
