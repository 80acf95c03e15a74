"""Exact polynomials through integer measurements: small bases over the inputs' symbols, solved in rationals,
checked at a held-out size.

A cost is linear in each number of rows and at most quadratic in widths (attention), so a tensor product of
those two bases comes first and all monomials up to degree three second. Measurements are taken at multiples
of eight, where floor divisions such as `S//4` are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import sympy

from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr

FIRST_SIZE, SIZE_STEP, HELD_OUT_SIZE = (
    16,
    8,
    72,
)  # sizes of measurements: BASE + k * STEP; the polynomial must also hold at HELD_OUT + STEP * place

SymbolSizes = Mapping[str, int]
Exponents = tuple[int, ...]
MeasureAt = Callable[[dict[str, int]], Sequence[int]]


def fit_polynomials(measure: MeasureAt, kinds: Mapping[str, str]) -> tuple[Expr, ...] | None:
    """Polynomials over symbols (name -> "rows" or "width") that give what `measure` gives, or None if none of
    the bases holds."""
    names = sorted(kinds)
    known: dict[tuple[int, ...], Sequence[int]] = {}

    def at(point: tuple[int, ...]) -> Sequence[int]:
        if point not in known:
            known[point] = measure(dict(zip(names, point, strict=True)))
        return known[point]

    held_out = tuple(HELD_OUT_SIZE + SIZE_STEP * i for i in range(len(names)))
    for basis in _candidate_bases(names, kinds):
        points = [tuple(FIRST_SIZE + SIZE_STEP * e for e in exponents) for exponents in basis]
        found = _solve_coefficients(names, basis, points, [at(p) for p in points])
        sizes = dict(zip(names, held_out, strict=True))
        if [size_expr.evaluate_expr(f, sizes) for f in found] == list(at(held_out)):
            return found
    return None


def fit_mean_cost(terms: Sequence[Expr], points: Sequence[Sequence[int]], values: Sequence[int]) -> Expr:
    """The cost of each row in the mean: `values` measured at `points`, values of `terms`, as whole multiples
    of these, none negative.

    With one term the sum of the measurements is kept, so that what grows with squares counts with the spread
    of the samples.
    """
    rest, found = np.array(values, dtype=float), [0.0] * len(terms)
    table = np.array(points, dtype=float).reshape(len(values), len(terms))
    used = [i for i in range(len(terms)) if table[:, i].any()]
    if len(used) > 1:
        while used:
            solved = np.linalg.lstsq(table[:, used], rest, rcond=None)[0]
            if (solved >= 0).all():
                break
            used.pop(int(solved.argmin()))
        for i, x in zip(used, solved if used else (), strict=True):
            found[i] = float(x)
    elif used:
        found[used[0]] = float(rest.sum() / table[:, used[0]].sum())
    return sympy.Add(*(round(x) * term for term, x in zip(terms, found, strict=True)))


def _candidate_bases(names: list[str], kinds: Mapping[str, str]) -> Iterator[list[Exponents]]:
    """Sets of exponents closed under division, for which measurements at BASE + STEP * exponents determine
    the polynomial."""
    rows, widths = (
        [i for i, n in enumerate(names) if (kinds[n] == "rows") is wanted] for wanted in (True, False)
    )
    candidates = list(product(range(4), repeat=len(names)))
    first = [e for e in candidates if sum(e[i] for i in rows) <= 1 and sum(e[i] for i in widths) <= 2]
    yield first
    second = [e for e in candidates if sum(e) <= 3]
    if set(second) - set(first):
        yield second


def _solve_coefficients(
    names: list[str], basis: list[Exponents], points: list[tuple[int, ...]], values: list[Sequence[int]]
) -> tuple[Expr, ...]:
    def monomial(base: Sequence[int | Expr], exponents: Exponents) -> Expr:
        return sympy.Mul(*(b**e for b, e in zip(base, exponents, strict=True)))

    matrix = sympy.Matrix([[monomial(p, e) for e in basis] for p in points])
    solution = matrix.LUsolve(sympy.Matrix([list(v) for v in values]))
    symbols = [size_expr.size_symbol(n) for n in names]
    terms = [monomial(symbols, e) for e in basis]
    return tuple(
        sympy.Add(*(solution[i, j] * t for i, t in enumerate(terms))) for j in range(solution.shape[1])
    )
