"""Size expressions on a rank: integer arithmetic over the symbols of the inputs, evaluated without sympy.

The grammar is Python's for integers, names, `+ - * // %`, parentheses, `min` and `max`; everything else is refused, so a
plan file can never run code. `secc.ir.expr` reads the same grammar into sympy.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


@lru_cache(maxsize=None)
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(text: str | int, sizes: Mapping[str, int]) -> int:
    """The value of expression `text` where each symbol has its size. Raises ValueError for anything outside the grammar."""
    return _value(_parse(str(text)), sizes)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return _CALLS[name](*(_value(a, sizes) for a in args))
    raise ValueError(f"not a size expression over {sorted(sizes)}: {ast.unparse(node)}")
