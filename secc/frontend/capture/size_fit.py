"""Explaining numbers that moved between captures as expressions over the sizes of the inputs.

A number is known at a few micro-batches whose sizes are known too. The simplest expression that fits all of
them exactly is taken, if it has fewer free coefficients than there are observations, so that at least one of
them checks what the others determined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import prod

import sympy

from secc.frontend.capture.stride_sizes import strides, telling
from secc.ir.dialect.size_expr import Expr, evaluate, symbol, symbols

DEGREE = 3
DENOMINATORS = 8  # S*(S + 1)//2 and its like; a larger denominator is chance
PRIME = (1 << 61) - 1

Column = tuple[int, ...]
Base = tuple[Callable[[], Expr], Column]  # an expression, made when it is wanted, and its values


class Fitter:
    """Expressions over symbols; `rows` are the sizes at each observation, in the order of the values to
    explain.

    `free` are the symbols for which an observation can be had at any greater size. `doubt` is such a symbol
    and size, if an explanation was given that an observation there may refute. `divided`: a floor division
    was, which a few numbers often fit by chance.
    """

    def __init__(self, rows: Sequence[Mapping[str, int]], free: Collection[str] = ()) -> None:
        self.rows = [dict(r) for r in rows]
        self.moving = [n for n in self.rows[0] if len({r[n] for r in self.rows}) > 1]
        self.doubt: tuple[str, int] | None = None
        self.divided = False
        self._free = frozenset(free)
        self._integers: dict[Column, Expr | None] = {}
        self._columns: dict[Expr, Column | None] = {}

    def with_symbol(self, name: str, values: Sequence[int]) -> Fitter:
        """A fitter that knows one more symbol."""
        found = Fitter(
            [{**row, name: value} for row, value in zip(self.rows, values, strict=True)], self._free
        )
        found.doubt, found.divided = self.doubt, self.divided
        return found

    def integer(self, values: Sequence[int]) -> Expr | None:
        """An expression with these values, None if none of those considered fits."""
        key = tuple(values)
        if key not in self._integers:
            self._integers[key] = next(self._candidates(key), None)
        return self._integers[key]

    def column(self, known: Expr) -> Column | None:
        """The values of an expression, None unless all its symbols move."""
        if known not in self._columns:
            moving = symbols(known) <= set(self.moving)
            self._columns[known] = tuple(int(evaluate(known, row)) for row in self.rows) if moving else None
        return self._columns[known]

    def real(self, values: Sequence[float]) -> Expr | float | None:
        """The number itself if it never moved, else a multiple of an integer expression or of its reciprocal;
        None if neither fits."""
        if len(set(values)) == 1:
            return values[0]
        if all(float(v).is_integer() for v in values):
            return self.integer([int(v) for v in values])
        for expr, column in self._factors():
            for power in (1, -1):
                ratios = [v / c**power for v, c in zip(values, column, strict=True)]
                if max(ratios) - min(ratios) <= 1e-12 * abs(ratios[0]):
                    return _nice(ratios[0]) * expr**power
        return None

    def about(self, name: str, decided: Collection[str]) -> Expr:
        """What a size that inputs' values decide is about, in permille of the product of at most two other
        symbols that it follows best.

        `decided` are all such sizes. A size that adds up over samples is what costs want, so one of the
        symbols counts rows.
        """
        values = [row.get(name, 0) for row in self.rows]
        known = [n for n in self.rows[0] if n not in decided]
        products = [p for k in (1, 2) for p in itertools.combinations(known, k)]
        products = [p for p in products if not self._free.issuperset(p) and 0 not in self._column(p)]
        if not any(values) or not products:
            return sympy.Integer(0)

        def spread(names: Sequence[str]) -> float:
            ratios = [v / c for v, c in zip(values, self._column(names), strict=True) if v]
            return (max(ratios) - min(ratios)) / sum(ratios)

        best = min(products, key=spread)
        total = sum(c for v, c in zip(values, self._column(best), strict=True) if v)
        return sympy.Rational(round(1000 * sum(values) / total), 1000) * _monomial(best)

    def _products(self, degrees: int = DEGREE) -> Iterator[tuple[str, ...]]:
        for degree in range(1, degrees + 1):
            yield from itertools.combinations_with_replacement(self.moving, degree)

    def _column(self, names: Sequence[str]) -> Column:
        return tuple(prod(row[n] for n in names) for row in self.rows)

    def _candidates(self, values: Column) -> Iterator[Expr]:
        """Expressions that fit, simple ones first: with few terms, of equally many the one with the smallest
        coefficients."""
        if len(set(values)) == 1:
            yield sympy.Integer(values[0])
            return
        one: Base = (lambda: sympy.Integer(1), (1,) * len(values))
        every: list[Base] = [(partial(_monomial, names), self._column(names)) for names in self._products()]
        small: list[Base] = [(partial(_monomial, names), self._column(names)) for names in self._products(2)]
        yield from _fits(values, ((m,) for m in every))
        yield from _at_least(values, self.rows, self.moving)
        yield from _fits(values, ((m, one) for m in every))
        yield from _fits(values, itertools.combinations(every, 2))
        yield from _fits(values, ((*pair, one) for pair in itertools.combinations(small, 2)))
        yield from _fits(values, itertools.combinations(small, 3))
        yield from self._wider(values, [one, *small])
        if found := strides(self.rows, values, self.moving, self._free):
            self.doubt, self.divided = self.doubt or telling(found, self.rows, self._free), True
            yield found[0].expr()

    def _wider(self, values: Column, others: Sequence[Base]) -> Iterator[Expr]:
        """Expressions in the wider one of two widths that were met in both orders: what pads one like the
        other takes it."""
        widths = [n for n in self.moving if n in self._free]
        for a, b in itertools.combinations(widths, 2):
            if {row[a] > row[b] for row in self.rows} == {True, False}:
                wider = sympy.Max(symbol(a), symbol(b))
                most = tuple(max(row[a], row[b]) for row in self.rows)
                times: list[Base] = [
                    (partial(sympy.Mul, make(), wider), _times(column, most)) for make, column in others
                ]
                yield from _fits(values, ((base,) for base in times))
                yield from _fits(values, itertools.product(times, others))

    def _factors(self) -> Iterator[tuple[Expr, Column]]:
        """What a moved real number may be a multiple of: monomials, and those with one symbol less a few
        (B*(S - 1))."""
        monomials = [(_monomial(names), self._column(names)) for names in ((), *self._products())]
        yield from ((e, c) for e, c in monomials[1:] if 0 not in c)
        for (e, c), name, shift in itertools.product(monomials, self.moving, (-1, 1, -2, 2)):
            column = tuple(v * (row[name] + shift) for v, row in zip(c, self.rows, strict=True))
            if 0 not in column:
                yield e * (symbol(name) + shift), column


def _times(a: Column, b: Column) -> Column:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _monomial(names: Sequence[str]) -> Expr:
    return sympy.Mul(*(symbol(n) for n in names))


def _at_least(values: Column, rows: Sequence[Mapping[str, int]], names: Sequence[str]) -> Iterator[Expr]:
    """One symbol, but 1 where it is 0."""
    for name in names:
        if any(row[name] == 0 for row in rows) and all(
            max(row[name], 1) == v for row, v in zip(rows, values, strict=True)
        ):
            yield sympy.Max(symbol(name), 1)


def _fits(values: Column, bases: Iterable[tuple[Base, ...]]) -> Iterator[Expr]:
    """The linear combinations of each basis that give the values, whole and small coefficients first: no rows
    of a sample are a fraction.

    A basis is smaller than the values are many.
    """
    found: list[tuple[bool, Fraction, Expr]] = []
    for basis in bases:
        if len(basis) >= len(values):
            continue
        coefficients = _solve([column for _, column in basis], values)
        if coefficients is not None and all(0 < c.denominator <= DENOMINATORS for c in coefficients):
            terms = [
                sympy.Rational(c.numerator, c.denominator) * make()
                for c, (make, _) in zip(coefficients, basis, strict=True)
            ]
            divided = any(c.denominator > 1 for c in coefficients)
            found.append((divided, sum((abs(c) for c in coefficients), Fraction(0)), sympy.Add(*terms)))
    yield from (expr for *_, expr in sorted(found, key=lambda entry: entry[:2]))


def _solve(columns: Sequence[Column], values: Column) -> list[Fraction] | None:
    """Coefficients with which the columns add up to the values exactly, None if there are none or they are
    not determined."""
    if not _consistent(columns, values):
        return None
    rows = [[Fraction(c[i]) for c in columns] + [Fraction(v)] for i, v in enumerate(values)]
    n = len(columns)
    for k in range(n):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for i, row in enumerate(rows):
            if i != k and row[k]:
                rows[i] = [x - row[k] * y for x, y in zip(row, rows[k], strict=True)]
    if any(row[n] for row in rows[n:]):
        return None
    found = [row[n] for row in rows[:n]]
    return found if all(found) else None


def _consistent(columns: Sequence[Column], values: Column) -> bool:
    """Whether there may be such coefficients: there are none if there are none modulo a prime that divides
    none of their denominators.

    A quick look before the exact solution of many candidates.
    """
    rows = [[*(c[i] for c in columns), v] for i, v in enumerate(values)]
    for k in range(len(columns)):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k] % PRIME), None)
        if pivot is None:
            return True  # the prime cannot tell
        rows[k], rows[pivot] = rows[pivot], rows[k]
        top = rows[k]
        lead = top[k]
        for i in range(k + 1, len(rows)):
            if factor := rows[i][k]:
                rows[i] = [(lead * x - factor * y) % PRIME for x, y in zip(rows[i], top, strict=True)]
    return not any(row[-1] % PRIME for row in rows[len(columns) :])


def _nice(value: float) -> Expr:
    """A float as the rational number that it stands for, if it is a simple one."""
    near = Fraction(value).limit_denominator(10_000)
    if near and abs(float(near) - value) <= 1e-12 * abs(value):
        return sympy.Rational(near.numerator, near.denominator)
    return sympy.Float(value)
