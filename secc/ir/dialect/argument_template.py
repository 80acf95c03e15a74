"""Argument templates: the argument list of a recorded call, as readable Python text and as a structure.

`"$0, [B, S - 1, 64], dtype=torch.float32"` is a call's argument list in which `$0` is the op's first operand,
`B` and `S` are symbols and `torch.float32` a name. `listed({…})` is a list that grows with the samples
(`secc.runtime.model.nested_batch`), `built("…", {…})` a dataclass (`secc.runtime.model.dataclass_args`);
their structure is the dict. Codegen prints the text with operands named; passes look at the structure.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sympy

from secc.ir.dialect import size_expr
from secc.runtime.plan.schema import CLASS, EACH

_REF = "_operand_"
_REFERENCE = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[$]([0-9]+)"""
)  # a text as it is, or an operand


@dataclass(frozen=True)
class Ref:
    """Operand `index` of the op."""

    index: int


@dataclass(frozen=True)
class Name:
    """A dotted name with a meaning of its own: `torch.float32`, `torch.contiguous_format`, `device`."""

    text: str


@dataclass
class Arguments:
    """Positional and keyword arguments: nested lists, tuples, dicts of Ref, Name, sympy expressions and
    literals."""

    args: list[Any] = field(default_factory=list[Any])
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def map(self, function: Callable[[Any], Any]) -> Arguments:
        """The same structure with `function` applied to every leaf."""
        return Arguments(
            [_map(a, function) for a in self.args], {k: _map(v, function) for k, v in self.kwargs.items()}
        )

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name; trailing defaults are not recorded."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def leaves(self) -> list[Any]:
        """All leaves in order."""
        found: list[Any] = []
        self.map(lambda leaf: found.append(leaf) or leaf)
        return found


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    match value:
        case list():
            return [_map(v, function) for v in value]  # pyright: ignore[reportUnknownVariableType]
        case tuple():
            return tuple(_map(v, function) for v in value)  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {k: _map(v, function) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case slice():
            return slice(*(_map(v, function) for v in (value.start, value.stop, value.step)))
        case _:
            return function(value)


def parse(text: str) -> Arguments:
    """Read a template. Raises ValueError if it is not one."""
    return _parsed(text).map(lambda leaf: leaf)


@cache  # alike blocks are called alike
def _parsed(text: str) -> Arguments:
    named = _REFERENCE.sub(lambda found: found[1] or f"{_REF}{found[2]}", text)
    try:
        call = ast.parse(f"f({named})", mode="eval").body
    except SyntaxError:
        raise ValueError(f"not an argument list: {text!r}") from None
    if not isinstance(call, ast.Call):
        raise ValueError(f"not an argument list: {text!r}")
    return Arguments([_read(a) for a in call.args], {k.arg or "**": _read(k.value) for k in call.keywords})


def _read(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name.startswith(_REF):
            return Ref(int(name.removeprefix(_REF)))
        case ast.Name(id="device"):
            return Name("device")
        case ast.Attribute():
            return Name(ast.unparse(node))
        case ast.List(elts=items):
            return [_read(i) for i in items]
        case ast.Tuple(elts=items):
            return tuple(_read(i) for i in items)
        case ast.Dict(keys=keys, values=values):
            return {_read(k): _read(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Call(func=ast.Name(id="listed"), args=[given]):
            return _read(given)
        case ast.Call(func=ast.Name(id="built"), args=[ast.Constant(value=name), fields]):
            return {CLASS: name} | _read(fields)
        case ast.Call(func=ast.Name(id="slice"), args=args):
            return slice(*(_read(a) for a in args))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(value))]):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _read(operand)
            return -value
        case _:
            value = size_expr.from_ast(node)
            return int(value) if value.is_Integer else value


def format(arguments: Arguments, name: Callable[[Ref], str] = lambda ref: f"${ref.index}") -> str:
    """The text of an argument list, with `name` giving the text of an operand."""
    positional = [_write(a, name) for a in arguments.args]
    keywords = [f"{k}={_write(v, name)}" for k, v in arguments.kwargs.items()]
    return ", ".join(positional + keywords)


def _write(value: Any, name: Callable[[Ref], str]) -> str:
    match value:
        case Ref():
            return name(value)
        case Name(text=text):
            return text
        case sympy.Expr():
            return _number(value)
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case list():
            return f"[{', '.join(_write(v, name) for v in value)}]"  # pyright: ignore[reportUnknownVariableType]
        case tuple():
            inner = ", ".join(_write(v, name) for v in value)  # pyright: ignore[reportUnknownVariableType]
            return f"({inner},)" if len(value) == 1 else f"({inner})"  # pyright: ignore[reportUnknownArgumentType]
        case {"*class": str() as cls}:
            fields = {k: v for k, v in value.items() if k != CLASS}  # pyright: ignore[reportUnknownVariableType]
            return f"built({cls!r}, {_write(fields, name)})"
        case dict():
            text = "{" + ", ".join(f"{k!r}: {_write(v, name)}" for k, v in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType]
            return f"listed({text})" if EACH in value else text
        case slice():
            return f"slice({', '.join(_write(v, name) for v in (value.start, value.stop, value.step))})"
        case None | bool() | int() | float() | str():
            return repr(value)
        case _:
            raise ValueError(f"an argument of type {type(value).__name__} cannot be printed")


def _number(value: sympy.Expr) -> str:
    """A size prints over `//`; a quotient that need not be whole (a moved float such as 1/B) prints over
    `/`."""
    numerator, denominator = sympy.fraction(sympy.together(value))
    if denominator.free_symbols:
        return f"({size_expr.text(numerator)})/({size_expr.text(denominator)})"
    return size_expr.text(value)
