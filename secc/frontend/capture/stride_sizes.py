"""Fits sizes that strides make: `(S + a)//d`, as patches, pooling and (stacked) convolutions divide a
length.

A few observations leave many offsets and divisors possible, and a wrong one fits until a batch refutes it.
So all that fit are kept, and `find_telling_length` names a length at which they disagree; a capture at
that length leaves fewer, and soon one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod

import sympy
import torch

from secc.ir.dialect.size_expr import Expr, size_symbol

MAX_DIVISOR = 1024  # the largest divisor that is looked for: raw sound has strides of 320 and 384
# Divisors that are accepted without a telling length, where lengths cannot be chosen.
NATURAL_DIVISORS = frozenset({*range(2, 17), 20, 24, 28, 32, 48, 64})
_COMPARED_STRIDES, _COMPARED_LENGTHS = 300, 256  # strides that are compared, and lengths to compare them at

SizeRow = Mapping[str, int]


@dataclass(frozen=True)
class StrideSize:
    """`factors * (multiplier * ((name + offset)//divisor) + remainder)`, for every offset from
    `min_offset` to `max_offset`."""

    factors: tuple[str, ...]
    name: str
    multiplier: int
    remainder: int
    divisor: int
    min_offset: int
    max_offset: int

    @property
    def offset(self) -> int:
        """The allowed offset nearest to 0."""
        return max(self.min_offset, min(self.max_offset, 0))

    def spread_offsets(self) -> list[int]:
        """Returns four of the allowed offsets, from the least to the greatest: a length that tells only the
        least from the others rules out hardly any."""
        return [self.min_offset + (self.max_offset - self.min_offset) * i // 3 for i in range(4)]

    def values_along(self, row: SizeRow, name: str, lengths: Sequence[int], offset: int) -> torch.Tensor:
        """Returns the values with each of `lengths` for the symbol `name` and the other sizes of `row`;
        shape [len(lengths)]."""
        moved: dict[str, torch.Tensor] = {n: torch.tensor(x) for n, x in row.items()} | {
            name: torch.tensor(lengths)
        }
        inner = self.multiplier * ((moved[self.name] + offset) // self.divisor) + self.remainder
        return prod((moved[n] for n in self.factors), start=inner).expand(len(lengths))

    def to_expr(self) -> Expr:
        """Returns the expression, with the offset nearest to 0."""
        quotient = sympy.floor((size_symbol(self.name) + self.offset) / sympy.Integer(self.divisor))
        return sympy.Mul(*(size_symbol(n) for n in self.factors), self.multiplier * quotient + self.remainder)


def find_strides(
    rows: Sequence[SizeRow], values: Sequence[int], moving: Sequence[str], free: Collection[str]
) -> list[StrideSize]:
    """Returns all strides with these values, simple ones first; only natural divisors for lengths that
    cannot be chosen."""
    found = [
        s
        for factors in ((), *((n,) for n in moving))
        for s in _strides_with_factors(rows, values, factors, moving, free)
    ]
    return sorted(
        found,
        key=lambda s: (
            s.divisor not in NATURAL_DIVISORS,
            len(s.factors),
            s.multiplier,
            abs(s.remainder),
            s.divisor,
            abs(s.offset),
        ),
    )


def _strides_with_factors(
    rows: Sequence[SizeRow],
    values: Sequence[int],
    factors: tuple[str, ...],
    moving: Sequence[str],
    free: Collection[str],
) -> Iterator[StrideSize]:
    scales = [prod(row[n] for n in factors) for row in rows]
    if 0 in scales or any(v % s for v, s in zip(values, scales, strict=True)):
        return
    inner = [v // s for v, s in zip(values, scales, strict=True)]
    step = reduce(gcd, (v - inner[0] for v in inner))
    for times in (t for t in range(1, step + 1) if step % t == 0):
        rest = inner[0] % times
        counts = [(v - rest) // times for v in inner]
        for name in moving:
            lengths = [row[name] for row in rows]
            for divisor, low, high in _fitting_divisors(
                lengths, counts, MAX_DIVISOR if name in free else max(NATURAL_DIVISORS)
            ):
                if name in free or (
                    divisor in NATURAL_DIVISORS and low < 2 * divisor and high > -2 * divisor
                ):
                    yield StrideSize(factors, name, times, rest, divisor, low, high)


def _fitting_divisors(
    lengths: Sequence[int], counts: Sequence[int], most: int
) -> Iterator[tuple[int, int, int]]:
    """Yields (d, least a, greatest a) such that `(length + a)//d == count` at all observations."""
    # As a is the same at all of them, d times the difference of two counts is that of the lengths, or differs
    # by less than d: that leaves few d for the two counts that are farthest apart.
    (least_count, short), (most_count, long) = (
        choose(zip(counts, lengths, strict=True), key=lambda pair: pair[0]) for choose in (min, max)
    )
    rise, run = most_count - least_count, long - short
    if rise > 1:
        most = min(most, -(-run // (rise - 1)) - 1)
    for d in range(max(2, run // (rise + 1) + 1), most + 1):
        low = max(d * c - x for x, c in zip(lengths, counts, strict=True))
        high = min(d * c + d - 1 - x for x, c in zip(lengths, counts, strict=True))
        if low <= high:
            yield d, low, high


def find_telling_length(
    strides: Sequence[StrideSize], rows: Sequence[SizeRow], free: Collection[str]
) -> tuple[str, int] | None:
    """Returns a symbol and a length, above the shortest observed, at which most strides disagree; None if
    its length cannot be chosen or all agree."""
    name = strides[0].name
    if name not in free:
        return None
    shortest, longest = min(rows, key=lambda row: row[name]), max(row[name] for row in rows)
    compared = [strides[0], *random.Random(0).sample(strides, min(len(strides), _COMPARED_STRIDES))]
    first, last = shortest[name] + 1, 2 * longest
    # Where the count of a stride goes up for the upper half of its offsets, and lengths in between.
    lengths = {first + (-first - (s.min_offset + s.max_offset + 1) // 2) % s.divisor for s in compared}
    lengths |= {*range(first, last, -(-(last - first) // _COMPARED_LENGTHS))}
    lengths_in_order = sorted(x for x in lengths if x <= last)
    values = torch.stack(
        [
            s.values_along(shortest, name, lengths_in_order, offset)
            for s in compared
            for offset in s.spread_offsets()
        ]
    )
    agreeing = (values == values.mode(dim=0).values).sum(dim=0)
    best = int(agreeing.argmin())
    return (name, lengths_in_order[best]) if agreeing[best] < len(values) else None
