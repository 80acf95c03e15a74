"""Size expressions on a rank: integer arithmetic over the symbols of the inputs, evaluated without sympy.

The grammar is Python's for integers, names, `+ - * // %`, parentheses, `min` and `max`; everything else is
refused, so a plan file can never run code of its own. `secc.ir.dialect.size_expr` reads the same grammar into
sympy. A text is read once, into a function of Python's, because a step evaluates the same few expressions for
thousands of samples, one at a time or all of them as columns.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

SymbolValues = Mapping[str, int]
SizeColumns = Mapping[str, Sequence[int]]

_BINARY_OPS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_ALLOWED_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def evaluate_expr(text: str | int, sizes: SymbolValues) -> int:
    """The value of expression `text` where each symbol has its size. Raises ValueError for anything outside
    the grammar."""
    try:
        return _compile_expr(str(text))(sizes)
    except KeyError as unknown:
        raise ValueError(
            f"not a size expression over {sorted(sizes)}: {unknown.args[0]!r} in {text}"
        ) from None


def evaluate_expr_columns(text: str | int, columns: SizeColumns, count: int) -> list[int]:
    """`evaluate` at `count` places at once: `columns` holds each symbol's sizes there. Raises ValueError as
    it does."""
    try:
        value = _compile_column_expr(str(text))(columns)
    except KeyError as unknown:
        raise ValueError(
            f"not a size expression over {sorted(columns)}: {unknown.args[0]!r} in {text}"
        ) from None
    return [value] * count if isinstance(value, int) else value


def divides_exactly(text: str, sizes: SymbolValues) -> bool:
    """Whether no quotient in expression `text` leaves a remainder."""

    def whole(node: ast.expr) -> bool:
        inner = all(whole(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
            return inner
        return (
            inner
            and evaluate_expr(ast.unparse(node.left), sizes) % evaluate_expr(ast.unparse(node.right), sizes)
            == 0
        )

    return "//" not in text or whole(ast.parse(text, mode="eval").body)


@cache
def _compile_expr(text: str) -> Callable[[SymbolValues], int]:
    """Expression `text` as a function of the symbols' sizes. Raises ValueError outside the grammar; the
    function KeyError for a name."""
    found, names = _parse_expr(text)
    return _eval_code(
        f"lambda sizes: (lambda {', '.join(names.values())}: {found})({_lookup_code('sizes', names)})"
    )


@cache
def _compile_column_expr(text: str) -> Callable[[SizeColumns], int | list[int]]:
    """The same of columns of sizes; one number where the expression has no symbols."""
    found, names = _parse_expr(text)
    if not names:
        return _eval_code(f"lambda columns: {found}")
    return _eval_code(
        f"lambda columns: [{found} for {', '.join(names.values())}, in zip({_lookup_code('columns', names)})]"
    )


def _parse_expr(text: str) -> tuple[str, dict[str, str]]:
    """Expression `text` in variables that nothing else is named, and these by their symbols."""
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"not a size expression: {text!r}") from None
    names: dict[str, str] = {}
    return ast.unparse(_rename_symbols(body, names)), names


def _rename_symbols(node: ast.expr, names: dict[str, str]) -> ast.expr:
    """The expression with its symbols as variables. Raises ValueError outside the grammar."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return node
        case ast.Name(id=name):
            return ast.Name(names.setdefault(name, f"_{len(names)}"))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ast.UnaryOp(ast.USub(), _rename_symbols(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY_OPS):
            return ast.BinOp(_rename_symbols(left, names), op, _rename_symbols(right, names))
        case ast.Call(func=ast.Name(id=name) as func, args=[_, *_] as args, keywords=[]) if (
            name in _ALLOWED_CALLS
        ):
            return ast.Call(func, [_rename_symbols(a, names) for a in args], [])
    raise ValueError(f"not a size expression: {ast.unparse(node)}")


def _lookup_code(table: str, names: Mapping[str, str]) -> str:
    return ", ".join(f"{table}[{name!r}]" for name in names)


def _eval_code(code: str) -> Callable[[Any], Any]:
    """The function that `code`, made of a checked expression, defines."""
    return eval(code, {"__builtins__": {}, "zip": zip, **_ALLOWED_CALLS})
