"""Size expressions on a rank: integer arithmetic over the symbols of the inputs, evaluated without sympy.

The grammar is Python's for integers, names, `+ - * // %`, parentheses, `min` and `max`; everything else is refused, so a
plan file can never run code. `secc.ir.expr` reads the same grammar into sympy. A text is read once, into closures: a step
evaluates the same few expressions for thousands of samples.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache

Sizes = Mapping[str, int]

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
        case ast.Constant(value=int(value)):
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
