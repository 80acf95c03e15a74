"""Splits the time of a micro-batch into shares of its samples that hold whatever else is in the micro-batch.

A bound over all ways to form micro-batches needs numbers `w(x)` such that every micro-batch M of at most m
samples takes at least the sum of `w(x)` over M. The time is an expression over the micro-batch's symbols. Its
polynomial parts are read as sums of monomials:

- A monomial with a rows symbol and a nonnegative coefficient is *additive*: rows add up and widths take their
  maximum, so it is at least the sum of its values for the samples alone. Floor division keeps that true.
  Where a coefficient is negative, widths are counted from 1, so that `B*S - B`, which is `B*(S - 1)`, has no
  negative one.
- Anything else (constants, such as the time to issue operations, and monomials of widths) does not fall when
  samples are added, so it is at least its value for each of m samples alone, and therefore at least the m-th
  part of their sum.
- Any branch of a maximum is a lower bound; the caller takes the largest.
- Whole pieces of a time N on k ranks, `N//max(1, R)*((R + k-1)//k)` with R pieces that add up over samples,
  take at least (N - R)/k: rounding down loses less than 1 a piece. That needs N to be 0 without pieces.

So `w(x) = additive(x) + rest(x) / m`. Memory gives another bound: let a micro-batch of several samples keep
at most R bytes for its backward, and let sample x add at least b(x) bytes to them. Then the time of M is at
least the sum of `additive(x) + rest(x) * min(b(x), R) / R` over its samples, because the b(x) of M add up to
at most R, and the rest of M is at least that of each of its samples.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

import sympy

from secc.ir.dialect import size_expr
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import Symbol

LARGE_SIZE = 10**18  # of a symbol: a monomial of it is not rounded to 0


@dataclass(frozen=True)
class AdditiveParts:
    """Two expressions with a sum of at most the time: the additive part, and a rest that never falls when
    samples are added; as terms that branches share, and as sums of them."""

    additive_terms: tuple[str, ...]
    rest_terms: tuple[str, ...]

    @property
    def additive_text(self) -> str:
        """The additive part, as an expression."""
        return _join_terms(self.additive_terms)

    @property
    def rest_text(self) -> str:
        """The rest, as an expression."""
        return _join_terms(self.rest_terms)


@cache
def split_additive(text: str, symbols: tuple[Symbol, ...]) -> tuple[AdditiveParts, ...]:
    """Splits a time expression into its additive part and rest, one entry for each branch of its maxima.

    Raises ValueError for text that is not a size expression.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"not a size expression: {text!r}") from None
    return tuple(AdditiveParts(tuple(a), tuple(r)) for a, r in _split_branches(tree, text.encode(), symbols))


BranchTerms = tuple[list[str], list[str]]  # additive terms, other terms


def _split_branches(node: ast.expr, source: bytes, symbols: tuple[Symbol, ...]) -> list[BranchTerms]:
    """Returns the terms of each branch of a part of the expression `source`."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [
                (a + c, b + d)
                for a, b in _split_branches(left, source, symbols)
                for c, d in _split_branches(right, source, symbols)
            ]
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=int(by))) if by > 0:
            return [
                ([f"({_join_terms(a)})//{by}"], [f"({_join_terms(b)})//{by}"])
                for a, b in _split_branches(left, source, symbols)
            ]
        case ast.Call(func=ast.Name(id="max"), args=args):
            return [branch for arg in args for branch in _split_branches(arg, source, symbols)]
        case (
            ast.BinOp(left=ast.Constant(value=int(by)), op=ast.Mult(), right=time)
            | ast.BinOp(left=time, op=ast.Mult(), right=ast.Constant(value=int(by)))
        ) if by >= 0 and not _is_polynomial(time):
            return [
                ([f"{by}*({_join_terms(a)})"], [f"{by}*({_join_terms(b)})"])
                for a, b in _split_branches(time, source, symbols)
            ]
        case ast.BinOp(left=time, op=ast.Sub(), right=ast.Constant(value=int(less))) if not _is_polynomial(
            time
        ):
            return [(a, [*b, f"-{less}"]) for a, b in _split_branches(time, source, symbols)]
        case ast.BinOp(
            left=ast.BinOp(
                left=time,
                op=ast.FloorDiv(),
                right=ast.Call(func=ast.Name(id="max"), args=[ast.Constant(value=1), pieces]),
            ),
            op=ast.Mult(),
            right=ast.BinOp(
                left=ast.BinOp(left=divided, op=ast.Add(), right=ast.Constant(value=int(more))),
                op=ast.FloorDiv(),
                right=ast.Constant(value=int(by)),
            ),
        ) if (
            by == more + 1
            and ast.dump(pieces) == ast.dump(divided)
            and (
                shares := [
                    a
                    for a, _ in _split_branches(time, source, symbols)
                    if _is_polynomial(pieces) and _is_free_without(a, _text_of(pieces, source), symbols)
                ]
            )
        ):
            return [([f"({_join_terms(a)} - ({_text_of(pieces, source)}))//{by}"], []) for a in shares]
    text = _text_of(node, source)
    return [_split_monomials(text, symbols)] if _is_polynomial(node) else [([], [text])]


def is_subadditive(text: str) -> bool:
    """Whether a micro-batch has at most the sum of what its samples have of this, but for rounding: sizes are
    nowhere multiplied by each other, and nothing is taken off."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval").body))
    except SyntaxError:
        return False
    if any(isinstance(n, ast.UnaryOp) for n in nodes):
        return False
    operations = [n for n in nodes if isinstance(n, ast.BinOp)]
    return all(
        isinstance(n.op, (ast.Add, ast.Mult, ast.FloorDiv))
        and (not isinstance(n.op, ast.FloorDiv) or isinstance(n.right, ast.Constant))
        and (not isinstance(n.op, ast.Mult) or not (_has_sizes(n.left) and _has_sizes(n.right)))
        for n in operations
    ) and all(isinstance(n.func, ast.Name) and n.func.id == "max" for n in nodes if isinstance(n, ast.Call))


def _has_sizes(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) for n in ast.walk(node))


def _text_of(node: ast.expr, source: bytes) -> str:
    return source[node.col_offset : node.end_col_offset].decode()


def _is_free_without(additive: Sequence[str], pieces: str, symbols: tuple[Symbol, ...]) -> bool:
    """Whether the polynomial `pieces` is a sum of rows symbols, and additive terms are 0 where all of these
    are."""
    rows = {size_expr.size_symbol(s.name) for s in symbols if s.kind == "rows"}
    parts = sympy.Add.make_args(sympy.expand(size_expr.parse_expr(pieces)))
    if not all(part.as_coeff_Mul()[0] >= 0 and part.as_coeff_Mul()[1] in rows for part in parts):
        return False
    some = {s.name for s in symbols} - {str(part.as_coeff_Mul()[1]) for part in parts}
    sizes = {s.name: LARGE_SIZE if s.name in some else 0 for s in symbols}
    return evaluate_expr(_join_terms(additive), sizes) == 0


def _is_polynomial(node: ast.expr) -> bool:
    allowed = (ast.BinOp, ast.UnaryOp, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Constant, ast.Name, ast.Load)
    return all(isinstance(n, allowed) for n in ast.walk(node))


@cache  # the times of a section under many shapes have the same polynomials
def _split_monomials(text: str, symbols: tuple[Symbol, ...]) -> BranchTerms:
    """Splits the monomials of a polynomial. If a coefficient stays negative, the whole polynomial counts
    as rest."""
    whole = size_expr.parse_expr(text)
    widths = [size_expr.size_symbol(s.name) for s in symbols if s.kind == "width"]
    rows = {size_expr.size_symbol(s.name) for s in symbols if s.kind == "rows"}
    for shift in (0, 1):
        terms = sympy.Add.make_args(sympy.expand(_substitute_symbols(whole, {w: w + shift for w in widths})))
        if all(term.as_coeff_Mul()[0] >= 0 for term in terms):
            additive: sympy.Expr = sum((t for t in terms if t.free_symbols & rows), sympy.Integer(0))
            additive = _substitute_symbols(additive, {w: w - shift for w in widths})
            return [_format_polynomial(additive)], [_format_polynomial(whole - additive)]
    return [], [text]


def _format_polynomial(value: sympy.Expr) -> str:
    """The text of a polynomial, with what divides all coefficients apart: products with it may exceed int64
    where values without it do not."""
    expanded = sympy.expand(value)
    divisor = gcd(*map(int, expanded.as_coefficients_dict().values()))
    if divisor <= 1 or not expanded.free_symbols:
        return size_expr.format_expr(expanded)
    return f"{divisor}*({size_expr.format_expr(sympy.expand(expanded / divisor))})"


def _substitute_symbols(value: sympy.Expr, by: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    return value.subs(list(by.items()), simultaneous=True)


def _join_terms(terms: Sequence[str]) -> str:
    return " + ".join(t for t in terms if t != "0") or "0"
