"""Jinja2 for code generation and reports: templates of `secc.templates`, strict about missing names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import jinja2

from secc.errors import printable_text

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
    environment.filters |= {
        "literal": string_literal,
        "comment": printable_text,
        "docstring": docstring_text,
        "frozenset": format_frozenset,
        "tuple": format_tuple,
    }
    return environment


def string_literal(text: str) -> str:
    """A Python literal of a text, in double quotes where they need no escapes."""
    literal = repr(text)
    return literal if '"' in text else f'"{literal[1:-1]}"'


def docstring_text(text: str) -> str:
    """A text in one line between triple double quotes, where it reads as it is."""
    return re.sub(r'"(?="|$)', r"\"", printable_text(text.replace("\\", "\\\\")))


def format_tuple(names: Iterable[str]) -> str:
    """A Python tuple of strings."""
    items = [string_literal(n) for n in names]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def format_frozenset(names: Iterable[str]) -> str:
    """A Python frozenset of strings."""
    items = [string_literal(n) for n in names]
    return f"frozenset({{{', '.join(items)}}})" if items else "frozenset()"


def render_template(template: str, **values: object) -> str:
    """The text of a template with its values."""
    return _environment().get_template(template).render(**values)
