"""Size expressions on a rank: integer arithmetic over the symbols of the inputs, evaluated without sympy.

The grammar is Python's for integers, names, `+ - * // %`, parentheses, `min` and `max`; everything else is refused, so a
plan file can never run code. `secc.ir.expr` reads the same grammar into sympy. A text is read once, into closures: a step
evaluates the same few expressions for thousands of samples, one at a time or all of them as columns.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import repeat

Sizes = Mapping[str, int]
Columns = Mapping[str, Sequence[int]]

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def evaluate(text: str | int, sizes: Sizes) -> int:
    """The value of expression `text` where each symbol has its size. Raises ValueError for anything outside the grammar."""
    try:
        return _function(str(text))(sizes)
    except KeyError as unknown:
        raise ValueError(f"not a size expression over {sorted(sizes)}: {unknown.args[0]!r} in {text}") from None


@cache
def _function(text: str) -> Callable[[Sizes], int]:
    """Expression `text` as a function of the symbols' sizes. Raises ValueError outside the grammar; the function KeyError for a name."""
    try:
        return _closure(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not a size expression: {text!r}") from None


def _closure(node: ast.expr) -> Callable[[Sizes], int]:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return lambda sizes: value
        case ast.Name(id=name):
            return lambda sizes: sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _closure(operand)
            return lambda sizes: -inner(sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            apply, first, second = _BINARY[type(op)], _closure(left), _closure(right)
            return lambda sizes: apply(first(sizes), second(sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            call, parts = _CALLS[name], [_closure(a) for a in args]
            return lambda sizes: call(part(sizes) for part in parts)
    raise ValueError(f"not a size expression: {ast.unparse(node)}")


def divides(text: str, sizes: Sizes) -> bool:
    """Whether no quotient in expression `text` leaves a remainder."""

    def whole(node: ast.expr) -> bool:
        inner = all(whole(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
            return inner
        return inner and _closure(node.left)(sizes) % _closure(node.right)(sizes) == 0

    return "//" not in text or whole(ast.parse(text, mode="eval").body)


def evaluate_columns(text: str | int, columns: Columns, count: int) -> list[int]:
    """`evaluate` at `count` places at once: `columns` holds each symbol's sizes there. Raises ValueError as it does."""
    try:
        value = _column_function(str(text))(columns)
    except KeyError as unknown:
        raise ValueError(f"not a size expression over {sorted(columns)}: {unknown.args[0]!r} in {text}") from None
    return [value] * count if isinstance(value, int) else list(value)


_Column = int | Sequence[int]  # a constant stands for a column of itself


@cache
def _column_function(text: str) -> Callable[[Columns], _Column]:
    try:
        return _column_closure(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not a size expression: {text!r}") from None


def _column_closure(node: ast.expr) -> Callable[[Columns], _Column]:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return lambda columns: value
        case ast.Name(id=name):
            return lambda columns: columns[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            negated = _column_closure(operand)
            return lambda columns: _mapped(operator.sub, 0, negated(columns))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            apply, first, second = _BINARY[type(op)], _column_closure(left), _column_closure(right)
            return lambda columns: _mapped(apply, first(columns), second(columns))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            call, parts = _CALLS[name], [_column_closure(a) for a in args]
            return lambda columns: _folded(call, [part(columns) for part in parts])
    raise ValueError(f"not a size expression: {ast.unparse(node)}")


def _mapped(apply: Callable[[int, int], int], a: _Column, b: _Column) -> _Column:
    if isinstance(a, int):
        return apply(a, b) if isinstance(b, int) else list(map(apply, repeat(a), b))
    return list(map(apply, a, repeat(b) if isinstance(b, int) else b))


def _folded(call: Callable[..., int], parts: Sequence[_Column]) -> _Column:
    value = parts[0]
    for part in parts[1:]:
        value = _mapped(call, value, part)
    return value
