"""Shapes of JSON data: functions that take a value and return it checked, or raise `MalformedValue` with the
place inside the file.

A rank reads plan.json with nothing but the standard library, so the few shapes that a plan needs are here.
Places are put together only when something is wrong, which keeps large files fast.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from secc.runtime.host.regular_files import open_regular_file

Shape = Callable[[Any], Any]

MAX_NUMBER = 1e30
_MAX_INTEGER = 2**63 - 1
_MAX_TEXT = 1 << 20  # characters
_MAX_ITEMS = 1 << 20
_MAX_DEPTH = 32  # of data without a shape of its own
_SHOWN_CHARACTERS = 60


class MalformedValue(ValueError):
    """A value that does not have the expected shape; `place` leads to it, such as `.edges[2].src`."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.message, self.place = message, place

    def inside(self, step: str | int) -> MalformedValue:
        """Returns the error as seen from the container that holds the value under `step`."""
        plain = isinstance(step, str) and re.fullmatch(r"\w+", step, re.ASCII)
        return MalformedValue(self.message, (f".{step}" if plain else f"[{step!r}]") + self.place)

    def __str__(self) -> str:
        return f"{self.place.removeprefix('.')}: {self.message}" if self.place else self.message


def read_json(path: Path, max_bytes: int) -> Any:
    """Reads JSON from a file of at most `max_bytes`. Raises OSError, or MalformedValue for anything else:
    no UTF-8, nesting too deep, integers of thousands of digits. Shapes refuse NaN and infinities."""
    if path.exists() and not path.is_file():
        raise MalformedValue("expected a file")
    with open_regular_file(path) as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise MalformedValue(f"expected a file of at most {max_bytes >> 20} MiB")
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise MalformedValue("the JSON is nested too deeply") from None
    except ValueError as error:
        raise MalformedValue(" ".join(str(error).split())) from None


def show_value(value: Any) -> str:
    """Returns a value as short text for a message."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        return "an integer beyond 64 bits"
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def expected(what: str, value: Any) -> MalformedValue:
    """Returns the error for `value` where `what` was expected."""
    return MalformedValue(f"expected {what}, got {show_value(value)}")


def text(value: Any) -> str:
    """A string that can be written as UTF-8."""
    if type(value) is not str:
        raise expected("text", value)
    if len(value) > _MAX_TEXT:
        raise MalformedValue(f"expected text of at most {_MAX_TEXT} characters, got {len(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise expected("text without lone surrogates", value) from None
    return value


def pattern(expression: str, what: str) -> Shape:
    """Text that matches a regular expression, described as `what`."""
    compiled = re.compile(expression)

    def check(value: Any) -> str:
        if not compiled.fullmatch(text(value)):
            raise expected(what, value)
        return value

    return check


def choice(*allowed: str) -> Shape:
    """One of these texts."""
    taken = frozenset(allowed)

    def check(value: Any) -> str:
        if type(value) is not str or value not in taken:
            raise expected(f"one of {', '.join(repr(a) for a in allowed)}", value)
        return value

    return check


def integer(least: int = -_MAX_INTEGER, most: int = _MAX_INTEGER) -> Shape:
    """An integer from `least` to `most`."""
    what = "an integer" + (f" from {least}" if least > -_MAX_INTEGER else "")
    what += f" to {most}" if most < _MAX_INTEGER else ""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise expected(what, value)
        return value

    return check


def number(least: float = -math.inf, most: float = MAX_NUMBER) -> Shape:
    """A finite number from `least` to `most`."""
    what = "a number" + (f" of at least {least:g}" if least > -math.inf else "")

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not max(least, -most) <= value <= most:
            raise expected(what, value)
        return value

    return check


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise expected("true or false", value)
    return value


def nullable(shape: Shape) -> Shape:
    """Null, or this shape."""
    return lambda value: None if value is None else shape(value)


def items_of(shape: Shape, most: int = _MAX_ITEMS, least: int = 0) -> Shape:
    """A list of values of one shape; gives a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or not least <= len(value) <= most:
            raise expected(f"a list of {least or 'at most'} {'or more' if least else most}", value)
        checked: list[Any] = []
        try:
            for item in value:
                checked.append(shape(item))
        except MalformedValue as error:
            raise error.inside(len(checked)) from None
        return tuple(checked)

    return check


def row_of(*shapes: Shape) -> Shape:
    """A list with one value of each shape, in order; gives a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(shapes):
            raise expected(f"a list of {len(shapes)}", value)
        checked: list[Any] = []
        try:
            for shape, item in zip(shapes, value, strict=True):
                checked.append(shape(item))
        except MalformedValue as error:
            raise error.inside(len(checked)) from None
        return tuple(checked)

    return check


def mapping_of(shape: Shape, key: Shape = text, most: int = _MAX_ITEMS) -> Shape:
    """An object with any keys and values of one shape."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > most:
            raise expected("an object", value)
        checked: dict[str, Any] = {}
        for name, item in value.items():
            try:
                checked[key(name)] = shape(item)
            except MalformedValue as error:
                raise error.inside(name) from None
        return checked

    return check


def record(
    required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, others: Shape | None = None
) -> Shape:
    """An object with these keys. Other keys have the shape `others`; without it they are refused."""
    shapes = {**required, **(optional or {})}

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise expected("an object", value)
        missing = next((name for name in required if name not in value), None)
        if missing is not None:
            raise MalformedValue(f"lacks the key {missing!r}")
        checked: dict[str, Any] = {}
        for name, item in value.items():
            shape = shapes.get(name, others)
            if shape is None:
                raise MalformedValue(f"has the unknown key {show_value(name)}")
            try:
                checked[name] = shape(item)
            except MalformedValue as error:
                raise error.inside(name) from None
        return checked

    return check


def dataclass_of(
    cls: Any, shapes: Mapping[str, Shape], left_out: Sequence[str] = (), optional: Sequence[str] = ()
) -> Shape:
    """An object with exactly the fields of a dataclass but those `left_out`; gives the dataclass. `optional`
    ones, which older files lack, have the dataclass's defaults."""
    names = [f.name for f in dataclasses.fields(cls) if f.name not in left_out]
    fields = record(
        {name: shapes[name] for name in names if name not in optional},
        {name: shapes[name] for name in optional},
    )
    return lambda value: cls(**fields(value))


def plain_data(value: Any, depth: int = 0) -> Any:
    """Any JSON data of limited depth, with texts and numbers as above; lists become tuples."""
    if depth > _MAX_DEPTH:
        raise MalformedValue(f"is nested more than {_MAX_DEPTH} levels deep")
    step: str | int = 0
    try:
        if type(value) is dict:
            checked: dict[str, Any] = {}
            for step, item in value.items():
                checked[text(step)] = plain_data(item, depth + 1)
            return checked
        if type(value) is list:
            found: list[Any] = []
            for step, item in enumerate(value):  # noqa: B007
                found.append(plain_data(item, depth + 1))
            return tuple(found)
    except MalformedValue as error:
        raise error.inside(step) from None
    if value is None or type(value) is bool:
        return value
    return text(value) if type(value) is str else number()(value)
