"""Fits exact polynomials over input sizes to integer counts.

A small basis of monomials is solved in rationals and checked at a size held out of the fit. Costs are linear
in each number of rows and at most quadratic in widths (attention), so the tensor product of those two bases
is tried first, and all monomials up to degree three second. Counts are taken at multiples of eight, where
floor divisions such as `S//4` are exact; at smaller sizes where code has a limit, such as a table of learned
positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import sympy
from sympy import QQ
from sympy.polys.matrices import DomainMatrix

from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr


@dataclass(frozen=True)
class SizeGrid:
    """Sizes at which counts are taken: `first + k * step`. The polynomial must also hold where the i-th
    symbol is `held_out + i * step`."""

    first: int
    step: int
    held_out: int


GRIDS = (SizeGrid(16, 8, 72), SizeGrid(16, 8, 48), SizeGrid(8, 4, 24), SizeGrid(4, 2, 12), SizeGrid(2, 1, 6))

_MOST_MONOMIALS = 64  # each costs a run
Exponents = tuple[int, ...]
MeasureAt = Callable[[dict[str, int]], Sequence[int]]


def fit_polynomials(
    measure: MeasureAt, kinds: Mapping[str, str], grid: SizeGrid = GRIDS[0]
) -> tuple[Expr, ...] | None:
    """Fit one polynomial to each count.

    measure: returns the counts at given symbol values. kinds: "rows" or "width" by symbol. grid: the sizes to
    measure at. Returns None if no basis fits.
    """
    names = sorted(kinds)
    measured: dict[tuple[int, ...], Sequence[int]] = {}

    def counts_at(point: tuple[int, ...]) -> Sequence[int]:
        if point not in measured:
            measured[point] = measure(dict(zip(names, point, strict=True)))
        return measured[point]

    bases = list(_candidate_bases(names, kinds))
    held_out = tuple(grid.held_out + grid.step * i for i in range(len(names)))
    if bases:  # the smallest and the largest sizes first: these may be beyond a limit of the code
        counts_at((grid.first,) * len(names))
        counts_at(held_out)
    for basis in bases:
        points = [tuple(grid.first + grid.step * e for e in exponents) for exponents in basis]
        polynomials = _solve_coefficients(names, basis, points, [counts_at(p) for p in points])
        sizes = dict(zip(names, held_out, strict=True))
        if [size_expr.evaluate_size(f, sizes) for f in polynomials] == list(counts_at(held_out)):
            return polynomials
    return None


def fit_mean_cost(terms: Sequence[Expr], points: Sequence[Sequence[int]], values: Sequence[int]) -> Expr:
    """Fit a cost that varies between samples as a linear combination of `terms` with non-negative integer
    coefficients.

    points: the values of `terms` at each sample. values: the cost at each sample. With a single term, the
    coefficient preserves the sum of the costs, so that superlinear parts are counted with the spread of the
    samples.
    """
    costs, coefficients = np.array(values, dtype=float), [0.0] * len(terms)
    table = np.array(points, dtype=float).reshape(len(values), len(terms))
    used = [i for i in range(len(terms)) if table[:, i].any()]
    if len(used) > 1:
        while used:
            solved = np.linalg.lstsq(table[:, used], costs, rcond=None)[0]
            if (solved >= 0).all():
                break
            used.pop(int(solved.argmin()))  # drop the most negative term and solve again
        for i, x in zip(used, solved if used else (), strict=True):
            coefficients[i] = float(x)
    elif used:
        coefficients[used[0]] = float(costs.sum() / table[:, used[0]].sum())
    return sympy.Add(*(round(x) * term for term, x in zip(terms, coefficients, strict=True)))


def _candidate_bases(names: list[str], kinds: Mapping[str, str]) -> Iterator[list[Exponents]]:
    """Yield sets of exponents closed under division: measurements at `first + step * exponents`
    determine the polynomial uniquely."""
    rows = [i for i, n in enumerate(names) if kinds[n] == "rows"]
    widths = [i for i, n in enumerate(names) if kinds[n] != "rows"]
    of_rows, of_widths = _monomials(rows, 1), _monomials(widths, 2)
    if len(of_rows) * len(of_widths) > _MOST_MONOMIALS:
        return
    chosen = [r + w for r in of_rows for w in of_widths]
    first, second = (
        sorted(tuple(m.count(i) for i in range(len(names))) for m in monomials)
        for monomials in (chosen, _monomials(range(len(names)), 3))
    )
    yield first
    if set(second) - set(first) and len(second) <= _MOST_MONOMIALS:
        yield second


def _monomials(symbols: Sequence[int], degree: int) -> list[tuple[int, ...]]:
    """Return all products of at most `degree` of these symbols."""
    return [m for d in range(degree + 1) for m in combinations_with_replacement(symbols, d)]


def _solve_coefficients(
    names: list[str], basis: list[Exponents], points: list[tuple[int, ...]], values: list[Sequence[int]]
) -> tuple[Expr, ...]:
    """Returns the polynomials over `basis` that have `values` at `points`, one for each column of these."""
    monomials = [[QQ(math.prod(map(pow, point, exponents))) for exponents in basis] for point in points]
    wanted = [[QQ(v) for v in row] for row in values]
    # Matrices over the rational numbers, which are a hundred times faster here than `sympy.Matrix`.
    matrix = DomainMatrix(monomials, (len(points), len(basis)), QQ)
    solution = matrix.lu_solve(DomainMatrix(wanted, (len(points), len(wanted[0])), QQ)).to_Matrix()
    symbols = [size_expr.size_symbol(n) for n in names]
    terms = [sympy.Mul(*(s**e for s, e in zip(symbols, exponents, strict=True))) for exponents in basis]
    return tuple(
        sympy.Add(*(solution[i, j] * t for i, t in enumerate(terms))) for j in range(solution.shape[1])
    )
