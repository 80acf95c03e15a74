"""Sizes that strides make: `(S + a)//d`, as patches, pooling and convolutions (one after another too) divide
a length.

A few observations leave many offsets and divisors possible, and a wrong one holds until a batch comes that
tells it from the right one. So all that fit are kept, and `telling` names a length at which they disagree:
captured there, fewer are left, and soon one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod

import sympy
import torch

from secc.ir.dialect.size_expr import Expr, symbol

MOST = 1024  # the largest divisor that is looked for: raw sound has strides of 320 and 384
NATURAL = frozenset(
    {*range(2, 17), 20, 24, 28, 32, 48, 64}
)  # divisors that need no proof where lengths cannot be chosen
_SAMPLE, _LENGTHS = 300, 256  # how many strides are compared, and at how many lengths

Row = Mapping[str, int]


@dataclass(frozen=True)
class Stride:
    """`factors * (times * ((name + offset)//divisor) + rest)` for every offset from `low` to `high`."""

    factors: tuple[str, ...]
    name: str
    times: int
    rest: int
    divisor: int
    low: int
    high: int

    @property
    def offset(self) -> int:
        """The offset nearest to none."""
        return max(self.low, min(self.high, 0))

    def along(self, row: Row, name: str, lengths: Sequence[int], offset: int) -> torch.Tensor:
        """The values at these sizes with each of `lengths` for the symbol `name`, [lengths]."""
        moved: dict[str, torch.Tensor] = {n: torch.tensor(x) for n, x in row.items()} | {
            name: torch.tensor(lengths)
        }
        inner = self.times * ((moved[self.name] + offset) // self.divisor) + self.rest
        return prod((moved[n] for n in self.factors), start=inner).expand(len(lengths))

    def expr(self) -> Expr:
        """The expression, with the offset nearest to none."""
        quotient = sympy.floor((symbol(self.name) + self.offset) / sympy.Integer(self.divisor))
        return sympy.Mul(*(symbol(n) for n in self.factors), self.times * quotient + self.rest)


def strides(
    rows: Sequence[Row], values: Sequence[int], moving: Sequence[str], free: Collection[str]
) -> list[Stride]:
    """All strides with these values, simple ones first. Where lengths are not `free` to be chosen, only
    natural ones."""
    found = [
        s for factors in ((), *((n,) for n in moving)) for s in _scaled(rows, values, factors, moving, free)
    ]
    return sorted(
        found,
        key=lambda s: (
            s.divisor not in NATURAL,
            len(s.factors),
            s.times,
            abs(s.rest),
            s.divisor,
            abs(s.offset),
        ),
    )


def _scaled(
    rows: Sequence[Row],
    values: Sequence[int],
    factors: tuple[str, ...],
    moving: Sequence[str],
    free: Collection[str],
) -> Iterator[Stride]:
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
            for divisor, low, high in _divisors(lengths, counts, MOST if name in free else max(NATURAL)):
                if name in free or (divisor in NATURAL and low < 2 * divisor and high > -2 * divisor):
                    yield Stride(factors, name, times, rest, divisor, low, high)


def _divisors(lengths: Sequence[int], counts: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """(d, least a, greatest a) with `(length + a)//d == count` for all."""
    for d in range(2, most + 1):
        low = max(d * c - x for x, c in zip(lengths, counts, strict=True))
        high = min(d * c + d - 1 - x for x, c in zip(lengths, counts, strict=True))
        if low <= high:
            yield d, low, high


def telling(found: Sequence[Stride], rows: Sequence[Row], free: Collection[str]) -> tuple[str, int] | None:
    """A symbol and a length of it, above the shortest observed, that tells most strides apart. None if it is
    not free or all agree."""
    name = found[0].name
    if name not in free:
        return None
    shortest, longest = min(rows, key=lambda row: row[name]), max(row[name] for row in rows)
    chosen = [found[0], *random.Random(0).sample(found, min(len(found), _SAMPLE))]
    first, last = shortest[name] + 1, 2 * longest
    # Where the count of a stride goes up for the upper half of its offsets, and lengths in between.
    lengths = {first + (-first - (s.low + s.high + 1) // 2) % s.divisor for s in chosen}
    lengths |= {*range(first, last, -(-(last - first) // _LENGTHS))}
    tried = sorted(x for x in lengths if x <= last)
    values = torch.stack(
        [s.along(shortest, name, tried, offset) for s in chosen for offset in (s.low, s.high)]
    )
    agreeing = (values == values.mode(dim=0).values).sum(dim=0)
    best = int(agreeing.argmin())
    return (name, tried[best]) if agreeing[best] < len(values) else None
