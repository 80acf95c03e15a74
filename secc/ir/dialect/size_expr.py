"""Size expressions as sympy: read, simplified, printed.

The text grammar is that of `secc.runtime.plan.expr_eval`, which ranks evaluate without sympy. Text is parsed
by hand and never given to `sympify`, which evaluates code and reads `S`, `I` and `N` as its own objects.
Symbols are integers that are not negative, so that `max(B, 0)` and `floor` simplify.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Any, cast

import sympy
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

Expr = sympy.Expr


@cache
def size_symbol(name: str) -> sympy.Symbol:
    """The symbol of a size: an integer of at least 0 (a micro-batch may have no image), one object for each
    name."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _floordiv(a: Any, b: Any) -> Any:
    return sympy.floor(a / b)


def _remainder(a: Any, b: Any) -> Any:
    # sympy 1.14 takes Mod(B * Mod(B, 4), 3) for Mod(B * Mod(B, 4)**2, 3)
    nested = isinstance(a, sympy.Expr) and a.has(sympy.Mod)
    return sympy.Mod(a, b, evaluate=not nested)


_BINARY_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: _floordiv,
    ast.Mod: _remainder,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": sympy.Min, "max": sympy.Max}


@cache
def parse_expr(text: str) -> Expr:
    """Parses an expression. Raises ValueError for anything outside the grammar."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"not a size expression: {text!r}") from None
    return expr_from_ast(body)


def expr_from_ast(node: ast.expr) -> Expr:
    """The expression of a Python syntax tree; `/` and `**` are accepted for costs and moved floats."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(value)):
            return sympy.Integer(value)
        case ast.Constant(value=float(value)):
            return sympy.Float(value)
        case ast.Name(id=name):
            return size_symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -expr_from_ast(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY_OPERATORS:
            return _BINARY_OPERATORS[type(op)](expr_from_ast(left), expr_from_ast(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(expr_from_ast(a) for a in args))
        case _:
            pass
    raise ValueError(f"not a size expression: {ast.unparse(node)!r}")


_ATOM_PRECEDENCE = 1000  # sympy's precedence of names and calls
_DIVISION_PRECEDENCE = (
    45  # of `//` and `%` here: between a sum and a product, because `2*a//b` is not `2*(a//b)`
)


class _ExprPrinter(StrPrinter):
    """Prints in the grammar that `parse` and `secc.runtime.plan.expr_eval` read: floor divisions as `//`, no
    rational numbers."""

    def parenthesize(self, item: Any, level: int, strict: bool = False) -> str:
        if isinstance(item, sympy.floor | sympy.Mod):
            return f"({self._print(item)})" if level > _DIVISION_PRECEDENCE else self._print(item)
        return super().parenthesize(item, level, strict)

    def _print_floor(self, expr: Any) -> str:
        return self.print_quotient(expr.args[0])

    def print_quotient(self, expr: Any) -> str:
        """A fraction over `//`."""
        numerator, denominator = sympy.fraction(sympy.together(expr))
        return f"{self._print_factor(sympy.expand(numerator))}//{self._print_factor(denominator)}"

    def _print_factor(self, expr: Any) -> str:
        """In parentheses unless it is a name, a number or a call."""
        return self.parenthesize(expr, _ATOM_PRECEDENCE, strict=True)

    def _print_Mul(self, expr: Any) -> str:
        if expr.as_coeff_Mul()[0].is_negative:
            return f"-{self.parenthesize(-expr, PRECEDENCE['Mul'], strict=True)}"  # `-(a//b)` is not `-a//b`
        return super()._print_Mul(expr)

    def _print_Pow(self, expr: Any, rational: bool = False) -> str:
        base, exponent = expr.args
        if not (exponent.is_Integer and exponent > 0):
            return super()._print_Pow(expr, rational)
        return "*".join([self._print_factor(base)] * int(exponent))  # ranks know no powers

    def _print_Float(self, expr: Any) -> str:
        return repr(float(expr))  # all digits

    def _print_Mod(self, expr: Any) -> str:
        return f"{self._print_factor(expr.args[0])} % {self._print_factor(expr.args[1])}"

    def _print_Min(self, expr: Any) -> str:
        return f"min({', '.join(sorted(self._print(a) for a in expr.args))})"

    def _print_Max(self, expr: Any) -> str:
        return f"max({', '.join(sorted(self._print(a) for a in expr.args))})"


@cache  # equal blocks have equal costs, which are printed many times
def format_expr(expr: Expr | int) -> str:
    """The text of an expression; `parse_expr` reads it back to an equal expression. A polynomial with integer
    values prints over `//`."""
    expr = sympy.sympify(expr) if isinstance(expr, int) else expr
    denominator = sympy.fraction(sympy.together(expr))[1]
    if denominator.is_Integer and denominator != 1:
        return _ExprPrinter().print_quotient(
            expr
        )  # a size is an integer, so an exact quotient and a floor division agree
    return _ExprPrinter().doprint(expr)


def evaluate_size(expr: Expr | int, sizes: Mapping[str, int]) -> int | float:
    """The value of an expression at given sizes: an int where it is whole, else a float. Raises ValueError
    for a size that is missing."""
    if isinstance(expr, int):
        return expr
    with suppress(_NotRational, ZeroDivisionError):
        exact = _evaluate_exactly(expr, sizes)
        return int(exact) if exact.denominator == 1 else float(exact)
    value = expr.subs({size_symbol(name): size for name, size in sizes.items()})
    if value.free_symbols:
        raise ValueError(f"{format_expr(expr)} needs sizes of {sorted(str(s) for s in value.free_symbols)}")
    return int(value) if value.is_Integer else float(value)


class _NotRational(Exception):
    """Not only whole sizes, fractions and what makes fractions of them."""


def _evaluate_exactly(expr: Any, sizes: Mapping[str, int]) -> int | Fraction:
    """The exact value; sympy would take hundreds of microseconds for it."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        size = sizes.get(expr.name)
        if isinstance(size, int):
            return size
    elif expr.is_Rational:
        return Fraction(int(expr.p), int(expr.q))
    elif expr.func in _EXACT_FUNCTIONS:
        return _EXACT_FUNCTIONS[expr.func]([_evaluate_exactly(a, sizes) for a in expr.args])
    elif expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return _evaluate_exactly(expr.base, sizes) ** int(expr.exp)
    raise _NotRational


_EXACT_FUNCTIONS: dict[Any, Callable[[list[int | Fraction]], int | Fraction]] = {
    sympy.Add: sum,
    sympy.Mul: math.prod,
    sympy.Min: min,
    sympy.Max: max,
    sympy.floor: lambda args: math.floor(args[0]),
    sympy.Mod: lambda args: args[0] % args[1],
}


def remove_rounding(expr: Expr) -> Expr:
    """The expression without floor, for sizes that are means."""
    return cast(Expr, expr.replace(sympy.floor, lambda whole: whole))


def symbol_names(expr: Expr | int) -> set[str]:
    """The names of the symbols in an expression."""
    return set() if isinstance(expr, int) else {s.name for s in expr.free_symbols}  # pyright: ignore[reportAttributeAccessIssue]
