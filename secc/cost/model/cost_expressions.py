"""Sums and maxima of costs that are kept as texts. Layers of a stack ask for the same ones again and again,
so answers are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import sympy

from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr


def max_expr(texts: Iterable[str]) -> str:
    """An expression that is the maximum of others, without those that another one always exceeds."""
    return _max_of_sorted(tuple(sorted(set(texts))))


@cache
def _max_of_sorted(texts: tuple[str, ...]) -> str:
    kept: list[str] = []
    for text in texts:
        if not any(_always_exceeds(other, text) for other in kept):
            kept = [other for other in kept if not _always_exceeds(text, other)] + [text]
    return kept[0] if len(kept) == 1 else f"max({', '.join(kept)})" if kept else "0"


def _always_exceeds(more: str, less: str) -> bool:
    """Whether a polynomial is at least another one for all sizes, because no coefficient of the difference is
    negative."""
    difference = sympy.expand(size_expr.parse_expr(more) - size_expr.parse_expr(less))
    return all(c.is_nonnegative for c in difference.as_coefficients_dict().values())


def substitute_estimates(text: str, abouts: Mapping[str, Expr]) -> str:
    """A text of costs with what some of its symbols are about in their place, in whole units."""
    found = size_expr.parse_expr(text)
    if not size_expr.symbol_names(found) & abouts.keys():
        return text
    replaced = sympy.expand(
        found.subs({size_expr.size_symbol(name): about for name, about in abouts.items()})
    )
    if replaced.has(sympy.floor) or any(about.has(sympy.Max) for about in abouts.values()):
        return size_expr.format_expr(
            found.subs({size_expr.size_symbol(name): _round_down(about) for name, about in abouts.items()})
        )
    return size_expr.format_expr(
        replaced.replace(
            lambda part: part.is_Rational and not part.is_Integer, lambda part: sympy.Integer(round(part))
        )
    )


def _round_down(about: Expr) -> Expr:
    """What a symbol is about, rounded down: the largest of others branch by branch."""
    return (
        sympy.Max(*(_round_down(part) for part in about.args if isinstance(part, Expr)))
        if isinstance(about, sympy.Max)
        else sympy.floor(about)
    )


def sum_counted_exprs(counts: Mapping[str, int]) -> str:
    """The sum of texts, each as often as it is counted."""
    return _sum_of_sorted(tuple(sorted(counts.items())))


@cache
def _sum_of_sorted(counts: tuple[tuple[str, int], ...]) -> str:
    return size_expr.format_expr(
        sympy.expand(sum((n * size_expr.parse_expr(t) for t, n in counts), sympy.Integer(0)))
    )
