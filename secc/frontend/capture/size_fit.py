"""Explains numbers that differ between captures as expressions over the sizes of the inputs.

A number is known at a few micro-batches, together with their sizes. The simplest expression that fits all
of them exactly is taken, if it has fewer free coefficients than there are observations, so that at least
one observation checks what the others determined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import prod

import sympy

from secc.frontend.capture.stride_sizes import StrideSize, find_strides, find_telling_length
from secc.ir.dialect.size_expr import Expr, evaluate_size, size_symbol, symbol_names

MAX_DEGREE = 3
MAX_DENOMINATOR = 8  # as in S*(S + 1)//2; a larger denominator fits by chance
_REMAINDER_ROWS = 8  # observations that a remainder has to fit: some lengths have a common step
_TERMS_IN_DOUBT = 3  # coefficients that may fit a few numbers by chance
_DOUBLINGS = 2  # times that a width is doubled to try an explanation
_FEW_SIZES = 2  # determine a sum of two terms, and check nothing
MODULUS = (1 << 61) - 1  # a Mersenne prime, for a quick test whether a linear system has a solution

ValueColumn = tuple[int, ...]
BasisTerm = tuple[Callable[[], Expr], ValueColumn]  # an expression, made when it is wanted, and its values


class SizeFitter:
    """Fits expressions over symbols to values at given observations.

    size_rows: symbol values at each observation, in the order of the values to explain. padded_symbols:
    symbols for which a micro-batch of any larger size can be had. doubts: such symbols, each with a size at
    which an explanation that was given may fail. used_division: a floor division was given, which
    often fits a few numbers by chance. is_probing: further observations can be made where `doubts` ask for
    them, so a remainder is given although it was never 0. Code may do something else there (`if n % 8:`).
    """

    def __init__(
        self, rows: Sequence[Mapping[str, int]], free: Collection[str] = (), is_probing: bool = False
    ) -> None:
        self.size_rows = [dict(r) for r in rows]
        self.moving_symbols = [n for n in self.size_rows[0] if len({r[n] for r in self.size_rows}) > 1]
        self.doubts: list[tuple[str, int]] = []
        self.used_division = False
        self._padded_symbols, self._is_probing = frozenset(free), is_probing
        self._fitted_integers: dict[ValueColumn, Expr | None] = {}
        self._column_cache: dict[Expr, ValueColumn | None] = {}

    def with_symbol(self, name: str, values: Sequence[int]) -> SizeFitter:
        """Returns a fitter with one more symbol."""
        fitter = SizeFitter(
            [{**row, name: value} for row, value in zip(self.size_rows, values, strict=True)],
            self._padded_symbols,
            self._is_probing,
        )
        fitter.doubts, fitter.used_division = self.doubts.copy(), self.used_division
        return fitter

    def fit_integer(self, values: Sequence[int]) -> Expr | None:
        """Returns an expression with these values; None if no candidate fits."""
        key = tuple(values)
        if key not in self._fitted_integers:
            self._fitted_integers[key] = next(self._fit_candidates(key), None)
        return self._fitted_integers[key]

    def evaluate_column(self, known: Expr) -> ValueColumn | None:
        """Returns the values of an expression at all observations; None unless all its symbols vary."""
        if known not in self._column_cache:
            moving = symbol_names(known) <= set(self.moving_symbols)
            self._column_cache[known] = (
                tuple(int(evaluate_size(known, row)) for row in self.size_rows) if moving else None
            )
        return self._column_cache[known]

    def fit_real(self, values: Sequence[float]) -> Expr | float | None:
        """Returns the number if it never varied, else a multiple of an integer expression or of its
        reciprocal; None if neither fits."""
        if len(set(values)) == 1 or all(map(math.isnan, values)):
            return values[0]
        if all(float(v).is_integer() for v in values):
            return self.fit_integer([int(v) for v in values])
        for expr, column in self._real_factors():
            for power in (1, -1):
                ratios = [v / c**power for v, c in zip(values, column, strict=True)]
                if max(ratios) - min(ratios) <= 1e-12 * abs(ratios[0]):
                    return _to_simple_rational(ratios[0]) * expr**power
        return None

    def estimate_data_size(self, name: str, decided: Collection[str]) -> Expr:
        """Estimates a size that values of the inputs decide as a multiple (in permille) of the product of
        at most two other symbols that it follows best.

        decided: all sizes that values decide. Costs add up over samples, so one of the symbols must count
        rows.
        """
        values = [row.get(name, 0) for row in self.size_rows]
        known = [n for n in self.size_rows[0] if n not in decided]
        products = [p for k in (1, 2) for p in itertools.combinations(known, k)]
        products = [
            p for p in products if not self._padded_symbols.issuperset(p) and 0 not in self._product_column(p)
        ]
        if not any(values) or not products:
            return sympy.Integer(0)

        def ratio_spread(names: Sequence[str]) -> float:
            ratios = [v / c for v, c in zip(values, self._product_column(names), strict=True) if v]
            return (max(ratios) - min(ratios)) / sum(ratios)

        best = min(products, key=ratio_spread)
        total = sum(c for v, c in zip(values, self._product_column(best), strict=True) if v)
        return sympy.Rational(round(1000 * sum(values) / total), 1000) * _make_monomial(best)

    def _symbol_products(self, degrees: int = MAX_DEGREE) -> Iterator[tuple[str, ...]]:
        for degree in range(1, degrees + 1):
            yield from itertools.combinations_with_replacement(self.moving_symbols, degree)

    def _product_column(self, names: Sequence[str]) -> ValueColumn:
        return tuple(prod(row[n] for n in names) for row in self.size_rows)

    def _fit_candidates(self, values: ValueColumn) -> Iterator[Expr]:
        """Yields expressions that fit, simple ones first: with few terms, then with small coefficients."""
        if len(set(values)) == 1:
            yield sympy.Integer(values[0])
            return
        one: BasisTerm = (lambda: sympy.Integer(1), (1,) * len(values))
        every: list[BasisTerm] = [
            (partial(_make_monomial, names), self._product_column(names)) for names in self._symbol_products()
        ]
        small: list[BasisTerm] = [
            (partial(_make_monomial, names), self._product_column(names))
            for names in self._symbol_products(2)
        ]
        yield from _fit_combinations(values, ((m,) for m in every))
        yield from _fit_at_least_one(values, self.size_rows, self.moving_symbols)
        least = list(self._fit_least_width(values))
        for expr in self._fit_wider_width(values, [one]):
            if least:  # the other width was the same in all batches where it was the wider one
                other = min(symbol_names(expr) - symbol_names(least[0]))
                self._doubt_at(self._double_width(other))
            yield expr
        yield from least
        for expr in _fit_combinations(values, ((m, one) for m in every)):
            self._doubt_at(self._find_negative_width(expr, values) or self._find_far_width(expr, _FEW_SIZES))
            yield expr
        for expr in _fit_combinations(values, itertools.combinations(every, 2)):
            self._doubt_if_divided(expr)
            yield expr
        yield from self._fit_wider_width(values, [one, *small])
        for expr in itertools.chain(
            _fit_combinations(values, ((*pair, one) for pair in itertools.combinations(small, 2))),
            _fit_combinations(values, itertools.combinations(small, 3)),
        ):
            far = self._find_far_width(expr, _TERMS_IN_DOUBT + 1)
            if far is None and self._count_sizes(expr) <= _TERMS_IN_DOUBT:
                continue  # no size checks what the others determine
            self._doubt_at(far)
            self._doubt_if_divided(expr)
            yield expr
        strides = find_strides(self.size_rows, values, self.moving_symbols, self._padded_symbols)
        yield from self._take_stride([s for s in strides if s.name in self._padded_symbols])
        yield from self._fit_remainder(values)
        yield from self._take_stride(strides)
        if max(values) < 0:  # the end of `arange(n - 1, -n, -1)`
            yield from (-expr for expr in self._fit_candidates(tuple(-v for v in values)))

    def _take_stride(self, found: Sequence[StrideSize]) -> Iterator[Expr]:
        """Yields the first of these strides, if there are any, in doubt where others disagree."""
        if found:
            self._doubt_at(find_telling_length(found, self.size_rows, self._padded_symbols))
            self.used_division = True
            yield found[0].to_expr()

    def _fit_remainder(self, values: ValueColumn) -> Iterator[Expr]:
        """Yields what a length lacks to a multiple of a divisor, as code that pads to whole patches adds, and
        what it has beyond one. Rows are never padded so."""
        widths = [n for n in self.moving_symbols if n in self._padded_symbols]
        for name, sign in itertools.product(widths, (1, -1)):
            multiples = [row[name] + sign * v for row, v in zip(self.size_rows, values, strict=True)]
            if min(values) < 0 or math.gcd(*(m - multiples[0] for m in multiples)) < max(values):
                continue  # they are no multiples of a divisor that is large enough
            strides = find_strides(self.size_rows, multiples, [name], self._padded_symbols)
            found = [s for s in strides if not s.factors and s.multiplier == s.divisor >= max(values)]
            is_seen_whole = bool(found) and not {0, found[0].divisor}.isdisjoint(values)
            if is_seen_whole or (found and self._is_probing):
                amount = sign * (found[0].to_expr() - size_symbol(name))
                longer = itertools.count(max(row[name] for row in self.size_rows) + 1)
                if not is_seen_whole:
                    asked = next(
                        n for n in longer if evaluate_size(amount, {name: n}) in (0, found[0].divisor)
                    )
                else:
                    asked = next(longer) if len(self.size_rows) < _REMAINDER_ROWS else None
                telling = find_telling_length(found, self.size_rows, self._padded_symbols)
                self._doubt_at(telling or (None if asked is None else (name, asked)))
                self.used_division = True
                yield amount

    def _fit_least_width(self, values: ValueColumn) -> Iterator[Expr]:
        """Yields max(N, width) and max(N - width, 0), as where code pads to at least N, if several narrow
        widths and a wide one give the values so."""
        for name in (n for n in self.moving_symbols if n in self._padded_symbols):
            widths = [row[name] for row in self.size_rows]
            padded = [v + w for v, w in zip(values, widths, strict=True)]
            for totals, subtracted in ((list(values), 0), (padded, size_symbol(name))):
                least = min(totals)
                has_both = len({w for w in widths if w < least}) > 1 and max(widths) > least
                if has_both and totals == [max(w, least) for w in widths]:
                    yield sympy.Max(size_symbol(name) - subtracted, least - subtracted)

    def _doubt_at(self, size: tuple[str, int] | None) -> None:
        """Notes a symbol and a size of it at which an explanation may fail, if there is one."""
        if size is not None and size not in self.doubts:
            self.doubts.append(size)

    def _find_negative_width(self, expr: Expr, values: ValueColumn) -> tuple[str, int] | None:
        """Returns a width at which the expression is -1 although no observed value is negative: `16 - S` is
        what code adds that pads to 16, or to a multiple of 8 if all observed widths lie between 9 and 15."""
        name = next(iter(symbol_names(expr)))
        most = evaluate_size(expr + size_symbol(name), {name: 0}) if name in self._padded_symbols else 0
        if min(values) < 0 or expr != most - size_symbol(name):
            return None
        return name, int(most) + 1

    def _find_far_width(self, expr: Expr, few: int) -> tuple[str, int] | None:
        """Returns a symbol of the expression and twice its largest observed size, where the expression can be
        tried; None if no symbol can be padded, or if more than `few` different sizes have been observed."""
        names = sorted(symbol_names(expr) & self._padded_symbols)
        return self._double_width(names[0]) if names and self._count_sizes(expr) <= few else None

    def _double_width(self, name: str) -> tuple[str, int] | None:
        """Returns a width symbol and twice its largest observed size. None if the width was doubled
        _DOUBLINGS times already: an explanation that holds until then is accepted."""
        widths = sorted({row[name] for row in self.size_rows})
        tried = len(widths) > _DOUBLINGS and all(
            wide >= 2 * narrow for narrow, wide in itertools.pairwise(widths[-1 - _DOUBLINGS :])
        )
        return None if tried else (name, 2 * widths[-1])

    def _count_sizes(self, expr: Expr) -> int:
        """The number of different sizes at which the symbols of an expression have been observed."""
        names = symbol_names(expr)
        return len({tuple(row[n] for n in names) for row in self.size_rows})

    def _doubt_if_divided(self, expr: Expr) -> None:
        """Doubts a sum over several symbols with a fraction of one: half of a difference fits what a stride
        makes of one length if another length happened to be even with it in all observations."""
        factors = (term.as_coeff_Mul()[0] for term in sympy.Add.make_args(sympy.expand(expr)))
        if len(symbol_names(expr)) > 1 and not all(factor.is_Integer for factor in factors):
            self.used_division = True
            widths = sorted(symbol_names(expr) & self._padded_symbols)
            self._doubt_at(self._double_width(widths[0]) if widths else None)

    def _fit_wider_width(self, values: ValueColumn, others: Sequence[BasisTerm]) -> Iterator[Expr]:
        """Yields expressions in the wider of two widths that were met in both orders, as where one is
        padded to the other."""
        widths = [n for n in self.moving_symbols if n in self._padded_symbols]
        for a, b in itertools.combinations(widths, 2):
            if {row[a] > row[b] for row in self.size_rows} == {True, False}:
                wider = sympy.Max(size_symbol(a), size_symbol(b))
                most = tuple(max(row[a], row[b]) for row in self.size_rows)
                times: list[BasisTerm] = [
                    (partial(sympy.Mul, make(), wider), _multiply_columns(column, most))
                    for make, column in others
                ]
                yield from _fit_combinations(values, ((base,) for base in times))
                yield from _fit_combinations(values, itertools.product(times, others))

    def _real_factors(self) -> Iterator[tuple[Expr, ValueColumn]]:
        """Yields candidates that a varying real number may be a multiple of: monomials, and monomials
        times a shifted symbol (B*(S - 1))."""
        monomials = [
            (_make_monomial(names), self._product_column(names)) for names in ((), *self._symbol_products())
        ]
        yield from ((e, c) for e, c in monomials[1:] if 0 not in c)
        for (e, c), name, shift in itertools.product(monomials, self.moving_symbols, (-1, 1, -2, 2)):
            column = tuple(v * (row[name] + shift) for v, row in zip(c, self.size_rows, strict=True))
            if 0 not in column:
                yield e * (size_symbol(name) + shift), column


def _multiply_columns(a: ValueColumn, b: ValueColumn) -> ValueColumn:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _make_monomial(names: Sequence[str]) -> Expr:
    return sympy.Mul(*(size_symbol(n) for n in names))


def _fit_at_least_one(
    values: ValueColumn, rows: Sequence[Mapping[str, int]], names: Sequence[str]
) -> Iterator[Expr]:
    """Yields max(symbol, 1) for each symbol that gives the values so."""
    for name in names:
        if any(row[name] == 0 for row in rows) and all(
            max(row[name], 1) == v for row, v in zip(rows, values, strict=True)
        ):
            yield sympy.Max(size_symbol(name), 1)


def _fit_combinations(values: ValueColumn, bases: Iterable[tuple[BasisTerm, ...]]) -> Iterator[Expr]:
    """Yields the linear combinations of each basis that give the values, integer and small coefficients
    first: no sample has a fraction of a row.

    A basis with as many terms as there are values is skipped, since nothing would check it.
    """
    fits: list[tuple[bool, Fraction, Expr]] = []
    for basis in bases:
        if len(basis) >= len(values):
            continue
        coefficients = solve_exactly([column for _, column in basis], values)
        if coefficients is not None and all(0 < c.denominator <= MAX_DENOMINATOR for c in coefficients):
            terms = [
                sympy.Rational(c.numerator, c.denominator) * make()
                for c, (make, _) in zip(coefficients, basis, strict=True)
            ]
            divided = any(c.denominator > 1 for c in coefficients)
            fits.append((divided, sum((abs(c) for c in coefficients), Fraction(0)), sympy.Add(*terms)))
    yield from (expr for *_, expr in sorted(fits, key=lambda entry: entry[:2]))


def solve_exactly(columns: Sequence[ValueColumn], values: ValueColumn) -> list[Fraction] | None:
    """Solves for the coefficients of the columns in a sum equal to the values, by Gaussian elimination over
    fractions; None if there are none, if they are not unique, or if one is 0."""
    if not _may_have_solution(columns, values):
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
    coefficients = [row[n] for row in rows[:n]]
    return coefficients if all(coefficients) else None


def _may_have_solution(columns: Sequence[ValueColumn], values: ValueColumn) -> bool:
    """Whether there may be such coefficients: eliminates modulo a large prime, which is cheap, before the
    exact solution of many candidates. A few observations refute most of them.

    There is no solution if there is none modulo a prime that divides none of the denominators.
    """
    rows = [*zip(*columns, values, strict=True)]
    few = rows[:: max(1, len(rows) // (len(columns) + 2))]
    return _is_solvable(few) and (len(few) == len(rows) or _is_solvable(rows))


def _is_solvable(equations: Sequence[Sequence[int]]) -> bool:
    """Whether linear equations, each with its value last, may have a solution modulo the prime."""
    rows, unknowns = [*equations], len(equations[0]) - 1
    for k in range(unknowns):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k] % MODULUS), None)
        if pivot is None:
            return True  # the prime cannot tell
        rows[k], rows[pivot] = rows[pivot], rows[k]
        top = rows[k]
        lead = top[k]
        for i in range(k + 1, len(rows)):
            if factor := rows[i][k]:
                rows[i] = [(lead * x - factor * y) % MODULUS for x, y in zip(rows[i], top, strict=True)]
    return not any(row[-1] % MODULUS for row in rows[unknowns:])


def _to_simple_rational(value: float) -> Expr:
    """Returns a float as the simple rational number that it stands for, else as a float."""
    near = Fraction(value).limit_denominator(10_000)
    if near and abs(float(near) - value) <= 1e-12 * abs(value):
        return sympy.Rational(near.numerator, near.denominator)
    return sympy.Float(value)
