"""Jinja2 for code generation and reports: templates of `secc.templates`, strict about missing names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import jinja2

_TEMPLATE_DIRECTORY = Path(__file__).parent.parent / "templates"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE_DIRECTORY),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=jinja2.select_autoescape(["html.j2"]),
    )
    environment.filters |= {"quoted": quote_string, "frozenset": format_frozenset, "tuple": format_tuple}
    return environment


def quote_string(text: str) -> str:
    """A Python string literal in double quotes."""
    return json.dumps(text)


def format_tuple(names: Iterable[str]) -> str:
    """A Python tuple of strings."""
    items = [quote_string(n) for n in names]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def format_frozenset(names: Iterable[str]) -> str:
    """A Python frozenset of strings."""
    items = [quote_string(n) for n in names]
    return f"frozenset({{{', '.join(items)}}})" if items else "frozenset()"


def render_template(template: str, **values: object) -> str:
    """The text of a template with its values."""
    return _environment().get_template(template).render(**values)
