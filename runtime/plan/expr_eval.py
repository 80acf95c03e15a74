"""Evaluates size and cost expressions on a rank: integer arithmetic over the symbols of the inputs, without
sympy.

The grammar is Python's for integers, names, `+ - * // %`, parentheses, `min` and `max`; everything else is
rejected, so a plan file cannot run code. `secc.ir.dialect.size_expr` parses the same grammar into sympy. Each
text is compiled once into a Python function, because a step evaluates the same few expressions for thousands
of samples, one at a time or as columns.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

SymbolValues = Mapping[str, int]
SizeColumns = Mapping[str, Sequence[int]]

_BINARY_OPS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_SHOWN_CHARACTERS = 200
_ALLOWED_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def evaluate_expr(text: str | int, sizes: SymbolValues) -> int:
    """Returns the value of expression `text` for the given symbol values.

    Raises ValueError for text outside the grammar and for symbols that `sizes` lacks.
    """
    try:
        return _compile_expr(str(text))(sizes)
    except KeyError as unknown:
        raise ValueError(
            f"unknown symbol {unknown.args[0]!r} in {text}; expected one of {sorted(sizes)}"
        ) from None


def evaluate_expr_columns(text: str | int, columns: SizeColumns, count: int) -> list[int]:
    """Evaluates expression `text` for `count` rows at once: `columns[symbol][i]` is the symbol's value in row
    i.

    Raises ValueError like `evaluate_expr`.
    """
    try:
        value = _compile_column_expr(str(text))(columns)
    except KeyError as unknown:
        raise ValueError(
            f"unknown symbol {unknown.args[0]!r} in {text}; expected one of {sorted(columns)}"
        ) from None
    return [value] * count if isinstance(value, int) else value


@cache
def expression_symbols(text: str) -> frozenset[str]:
    """Returns the symbols of expression `text`. Raises ValueError for text outside the grammar."""
    return frozenset(_parse_expr(text)[1])


def divides_exactly(text: str, sizes: SymbolValues) -> bool:
    """Returns whether every floor division in expression `text` is exact for these symbol values."""

    def is_exact(node: ast.expr) -> bool:
        inner = all(is_exact(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
            return inner
        return (
            inner
            and evaluate_expr(ast.unparse(node.left), sizes) % evaluate_expr(ast.unparse(node.right), sizes)
            == 0
        )

    return "//" not in text or is_exact(ast.parse(text, mode="eval").body)


@cache
def _compile_expr(text: str) -> Callable[[SymbolValues], int]:
    """Compiles expression `text` into a function of the symbol values. Raises ValueError outside the grammar;
    the function raises KeyError for an unknown symbol.
    """
    code, names = _parse_expr(text)
    return _eval_code(
        f"lambda sizes: (lambda {', '.join(names.values())}: {code})({_lookup_code('sizes', names)})"
    )


@cache
def _compile_column_expr(text: str) -> Callable[[SizeColumns], int | list[int]]:
    """Compiles expression `text` into a function of columns of symbol values, which returns a list, or one
    number if the expression has no symbols.
    """
    code, names = _parse_expr(text)
    if not names:
        return _eval_code(f"lambda columns: {code}")
    return _eval_code(
        f"lambda columns: [{code} for {', '.join(names.values())}, in zip({_lookup_code('columns', names)})]"
    )


def _parse_expr(text: str) -> tuple[str, dict[str, str]]:
    """Returns expression `text` with its symbols replaced by safe variable names, and {symbol: variable}."""
    names: dict[str, str] = {}
    try:
        return ast.unparse(_rename_symbols(ast.parse(text, mode="eval").body, names)), names
    except (SyntaxError, RecursionError, MemoryError):  # the latter two: nested too deeply
        raise ValueError(f"not a size expression: {text[:_SHOWN_CHARACTERS]!r}") from None


def _rename_symbols(node: ast.expr, names: dict[str, str]) -> ast.expr:
    """Returns the expression with its symbols replaced by variables, which are added to `names`. Raises
    ValueError outside the grammar.
    """
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return node
        case ast.Name(id=name):
            return ast.Name(names.setdefault(name, f"_{len(names)}"))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ast.UnaryOp(ast.USub(), _rename_symbols(operand, names))
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), right=ast.Constant(value=0)):
            pass
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
    """Evaluates `code`, the source of a lambda made of a checked expression."""
    return eval(code, {"__builtins__": {}, "zip": zip, **_ALLOWED_CALLS})
