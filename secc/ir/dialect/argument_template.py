"""Argument templates: the argument list of a recorded call, as readable Python text and as a structure.

`"$0, [B, S - 1, 64], dtype=torch.float32"` is a call's argument list in which `$0` is the op's first operand,
`B` and `S` are symbols and `torch.float32` a name. `listed({…})` is a list that grows with the samples
(`secc.runtime.model.nested_batch`), `built("…", {…})` a dataclass (`secc.runtime.model.dataclass_args`);
their structure is the dict. Codegen prints the text with operands named; passes look at the structure.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sympy

from secc.ir.dialect import size_expr
from secc.runtime.plan.schema import CLASS_KEY, COUNTS_SUFFIX, EACH_SUFFIX

_OPERAND_PREFIX = "_operand_"
_OPERAND_PATTERN = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[$]([0-9]+)"""
)  # a text as it is, or an operand


@dataclass(frozen=True)
class OperandRef:
    """Operand `index` of the op."""

    index: int


@dataclass(frozen=True)
class DottedName:
    """A dotted name with a meaning of its own: `torch.float32`, `torch.contiguous_format`, `device`."""

    text: str


@dataclass
class CallArguments:
    """Positional and keyword arguments: nested lists, tuples, dicts of OperandRef, DottedName, sympy
    expressions and literals."""

    args: list[Any] = field(default_factory=list[Any])
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def map_leaves(self, function: Callable[[Any], Any]) -> CallArguments:
        """A copy with `function` applied to every leaf."""
        return CallArguments(
            [_map_value(a, function) for a in self.args],
            {k: _map_value(v, function) for k, v in self.kwargs.items()},
        )

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name, `default` where it was not given (trailing defaults are not
        recorded)."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def leaves(self) -> list[Any]:
        """All leaves in order."""
        found: list[Any] = []
        self.map_leaves(lambda leaf: found.append(leaf) or leaf)
        return found


def _map_value(value: Any, function: Callable[[Any], Any]) -> Any:
    match value:
        case list():
            return [_map_value(v, function) for v in value]  # pyright: ignore[reportUnknownVariableType]
        case tuple():
            return tuple(_map_value(v, function) for v in value)  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {k: _map_value(v, function) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case slice():
            return slice(*(_map_value(v, function) for v in (value.start, value.stop, value.step)))
        case _:
            return function(value)


def parse_arguments(text: str) -> CallArguments:
    """Parses a template. Raises ValueError for anything that is not an argument list."""
    return _parse_cached(text).map_leaves(lambda leaf: leaf)


@cache  # equal blocks are called with equal templates
def _parse_cached(text: str) -> CallArguments:
    named = _OPERAND_PATTERN.sub(lambda found: found[1] or f"{_OPERAND_PREFIX}{found[2]}", text)
    try:
        call = ast.parse(f"f({named})", mode="eval").body
    except SyntaxError:
        raise ValueError(f"not an argument list: {text!r}") from None
    if not isinstance(call, ast.Call):
        raise ValueError(f"not an argument list: {text!r}")
    kwargs: dict[str, Any] = {}
    for given in call.keywords:  # an argument that has no name is a dict of those that are no identifiers
        value = _read_node(given.value)
        kwargs |= {given.arg: value} if given.arg is not None else value
    return CallArguments([_read_node(a) for a in call.args], kwargs)


def _read_node(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name.startswith(_OPERAND_PREFIX):
            return OperandRef(int(name.removeprefix(_OPERAND_PREFIX)))
        case ast.Name(id="device"):
            return DottedName("device")
        case ast.Attribute():
            return DottedName(ast.unparse(node))
        case ast.List(elts=items):
            return [_read_node(i) for i in items]
        case ast.Tuple(elts=items):
            return tuple(_read_node(i) for i in items)
        case ast.Dict(keys=keys, values=values):
            return {_read_node(k): _read_node(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Call(func=ast.Name(id="listed"), args=[given]):
            return _read_node(given)
        case ast.Call(func=ast.Name(id="built"), args=[ast.Constant(value=name), fields]):
            return {CLASS_KEY: name} | _read_node(fields)
        case ast.Call(func=ast.Name(id="slice"), args=args):
            return slice(*(_read_node(a) for a in args))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(value))]):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _read_node(operand)
            return -value
        case _:
            value = size_expr.expr_from_ast(node)
            return int(value) if value.is_Integer else value


def format_arguments(
    arguments: CallArguments, name: Callable[[OperandRef], str] = lambda ref: f"${ref.index}"
) -> str:
    """The text of an argument list; `name` gives the text of an operand."""
    positional = [_write_value(a, name) for a in arguments.args]
    named = list(itertools.takewhile(_is_plain_name, arguments.kwargs))
    keywords = [f"{k}={_write_value(arguments.kwargs[k], name)}" for k in named]
    others = {k: v for k, v in arguments.kwargs.items() if k not in named}  # in their order
    return ", ".join(positional + keywords + ([f"**{_write_dict(others, name)}"] if others else []))


def _is_plain_name(text: str) -> bool:
    """Whether Python keeps a text as it is where it stands as a name."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _write_dict(values: Mapping[Any, Any], name: Callable[[OperandRef], str]) -> str:
    return "{" + ", ".join(f"{k!r}: {_write_value(v, name)}" for k, v in values.items()) + "}"


def _write_value(value: Any, name: Callable[[OperandRef], str]) -> str:
    match value:
        case OperandRef():
            return name(value)
        case DottedName(text=text):
            return text
        case sympy.Expr():
            return _write_expr(value)
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case list():
            return f"[{', '.join(_write_value(v, name) for v in value)}]"  # pyright: ignore[reportUnknownVariableType]
        case tuple():
            inner = ", ".join(_write_value(v, name) for v in value)  # pyright: ignore[reportUnknownVariableType]
            return f"({inner},)" if len(value) == 1 else f"({inner})"  # pyright: ignore[reportUnknownArgumentType]
        case {"*class": str() as cls}:
            fields = {k: v for k, v in value.items() if k != CLASS_KEY}  # pyright: ignore[reportUnknownVariableType]
            return f"built({cls!r}, {_write_value(fields, name)})"
        case dict():
            text = _write_dict(value, name)  # pyright: ignore[reportUnknownArgumentType]
            return f"listed({text})" if EACH_SUFFIX in value or COUNTS_SUFFIX in value else text
        case slice():
            return f"slice({', '.join(_write_value(v, name) for v in (value.start, value.stop, value.step))})"
        case None | bool() | int() | float() | str():
            return repr(value)
        case _:
            raise ValueError(f"an argument of type {type(value).__name__} cannot be printed")


def _write_expr(value: sympy.Expr) -> str:
    """A size prints over `//`; a quotient that need not be whole (a moved float such as 1/B) prints over
    `/`."""
    numerator, denominator = sympy.fraction(sympy.together(value))
    if denominator.free_symbols:
        return f"({size_expr.format_expr(numerator)})/({size_expr.format_expr(denominator)})"
    return size_expr.format_expr(value)
