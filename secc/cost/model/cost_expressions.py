"""Sums and maxima of cost expressions in text form.

The layers of a stack ask for the same sums many times, so results are cached.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache

import sympy

from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr


def max_expr(texts: Iterable[str]) -> str:
    """The symbolic maximum of expressions. Expressions that another one exceeds for all sizes are left
    out."""
    return _max_of_sorted(tuple(sorted(set(texts))))


@cache
def _max_of_sorted(texts: tuple[str, ...]) -> str:
    maximal: list[str] = []
    for text in texts:
        if not any(_always_exceeds(other, text) for other in maximal):
            maximal = [other for other in maximal if not _always_exceeds(text, other)] + [text]
    return maximal[0] if len(maximal) == 1 else f"max({', '.join(maximal)})" if maximal else "0"


def _always_exceeds(more: str, less: str) -> bool:
    """Whether `more` >= `less` for all sizes: no coefficient of the difference is negative."""
    difference = sympy.expand(_parse_with_calls_as_symbols(more) - _parse_with_calls_as_symbols(less))
    return all(c.is_nonnegative for c in difference.as_coefficients_dict().values())


@cache
def _parse_with_calls_as_symbols(text: str) -> Expr:
    """Parses an expression with a symbol for each maximum and minimum: sympy compares all their arguments,
    which takes up to a second."""
    return size_expr.expr_from_ast(_CallsAsSymbols().visit(ast.parse(text, mode="eval").body))


class _CallsAsSymbols(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Name:
        """A name for the call, the same for equal ones."""
        return ast.Name(id=ast.unparse(node))


def substitute_estimates(text: str, estimates: Mapping[str, Expr]) -> str:
    """Substitute estimates for data-dependent symbols in a cost expression, and round to integers.

    estimates: expression over the remaining symbols for each data-dependent symbol. An estimate that is a
    maximum, or contains floor divisions, is rounded before it is inserted, because the result is no
    polynomial then; otherwise the coefficients of the result are rounded.
    """
    expression = size_expr.parse_expr(text)
    if not size_expr.symbol_names(expression) & estimates.keys():
        return text
    substituted = sympy.expand(
        expression.subs({size_expr.size_symbol(name): estimate for name, estimate in estimates.items()})
    )
    if substituted.has(sympy.floor) or any(estimate.has(sympy.Max) for estimate in estimates.values()):
        return size_expr.format_expr(
            expression.subs(
                {size_expr.size_symbol(name): _round_down(estimate) for name, estimate in estimates.items()}
            )
        )
    return size_expr.format_expr(
        substituted.replace(
            lambda part: part.is_Rational and not part.is_Integer, lambda part: sympy.Integer(round(part))
        )
    )


def _round_down(estimate: Expr) -> Expr:
    """The floor of an estimate; of a maximum, the maximum of the floors."""
    return (
        sympy.Max(*(_round_down(part) for part in estimate.args if isinstance(part, Expr)))
        if isinstance(estimate, sympy.Max)
        else sympy.floor(estimate)
    )


def scale_expression(text: str, share: Fraction) -> str:
    """The fraction `share` of an expression, in whole units."""
    return text if share == 1 or text == "0" else f"({text})*{share.numerator}//{share.denominator}"


def sum_counted_exprs(counts: Mapping[str, int]) -> str:
    """The sum of expressions, each multiplied by its count."""
    return _sum_of_sorted(tuple(sorted(counts.items())))


@cache
def _sum_of_sorted(counts: tuple[tuple[str, int], ...]) -> str:
    return size_expr.format_expr(
        sympy.expand(sum((n * size_expr.parse_expr(t) for t, n in counts), sympy.Integer(0)))
    )
