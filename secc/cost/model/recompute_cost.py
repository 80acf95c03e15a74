"""What recomputation changes of a section's cost: the bytes kept until the backward, and what runs again
there.

`full` runs every unit of every call again, `selective` every second layer of a stack
(`secc.runtime.sections.recompute`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import sympy

from secc.cost.model.cost_expressions import max_expr, sum_counted_exprs
from secc.cost.model.default_estimate import ZERO, CallCost
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GraphOp
from secc.ir.dialect.size_expr import Expr
from secc.runtime.sections.selective_layers import select_alternate_blocks


@dataclass(frozen=True)
class RecomputeCost:
    """One way of recomputation (texts over a micro-batch's symbols): bytes `saved` until the backward, bytes
    that are `working` while one unit runs again; work (FLOPs of large products), operations and bytes moved
    of all second runs."""

    saved: str
    working: str
    work: str
    ops: int
    moved: str = "0"


@dataclass
class _RecomputeSum:
    """Running sums of one way over one case."""

    saved: Counter[str] = field(default_factory=Counter[str])
    working: set[str] = field(default_factory=set[str])
    work: Counter[str] = field(default_factory=Counter[str])
    moved: Counter[str] = field(default_factory=Counter[str])
    ops: int = 0

    def add_recomputed_share(self, cost: CallCost, share: Fraction) -> None:
        """Add a call of whose units `share` run again."""
        self.saved[_interpolate(cost.saved, cost.kept, share)] += 1
        self.work[_interpolate(ZERO, cost.again, share)] += 1
        self.moved[_interpolate(ZERO, cost.again_moved, share)] += 1
        self.ops += int(share * cost.ops)


@cache
def _interpolate(rest: Expr, part: Expr, share: Fraction) -> str:
    """So much of `part`, and of `rest` what is left of the whole."""
    return size_expr.format_expr(
        sympy.expand(rest + sympy.Rational(share.numerator, share.denominator) * (part - rest))
    )


@dataclass
class RecomputeAccumulator:
    """Running sums over one case, for each way."""

    full: _RecomputeSum = field(default_factory=_RecomputeSum)
    selective: _RecomputeSum = field(default_factory=_RecomputeSum)

    def add_call(self, cost: CallCost, picked: bool) -> None:
        """Add a call; `picked` says whether its block is one of every second in a row of alike blocks."""
        self.full.add_recomputed_share(cost, Fraction(cost.units > 0))
        self.full.working.add(size_expr.format_expr(cost.working))
        # The last layer is never among every second ones: what it kept is free when the first of them runs
        # again, so `working` is 0.
        self.selective.add_recomputed_share(
            cost, Fraction(cost.units // 2, cost.units) if cost.units > 1 else Fraction(cost.units * picked)
        )

    def add_saved_bytes(self, size: str) -> None:
        """Add bytes that glue saves, which never runs again."""
        for way in (self.full, self.selective):
            way.saved[size] += 1


def recompute_costs(sums: Sequence[RecomputeAccumulator]) -> dict[str, RecomputeCost]:
    """What each way comes to: the largest of the cases' sums."""
    return {
        "selective": _max_recompute_cost([s.selective for s in sums]),
        "full": _max_recompute_cost([s.full for s in sums]),
    }


def _max_recompute_cost(sums: Sequence[_RecomputeSum]) -> RecomputeCost:
    return RecomputeCost(
        max_expr(sum_counted_exprs(s.saved) for s in sums),
        max_expr(text for s in sums for text in s.working),
        max_expr(sum_counted_exprs(s.work) for s in sums),
        max((s.ops for s in sums), default=0),
        max_expr(sum_counted_exprs(s.moved) for s in sums),
    )


def selectively_recomputed_blocks(graph: GraphOp, paths: Iterable[str]) -> set[str]:
    """The blocks, of those at `paths`, that run again under `selective` because they are every second in a
    row of alike ones."""
    declared = graph.blocks
    known = [p for p in paths if p in declared]
    return set(select_alternate_blocks(known, {p: declared[p].cls.data for p in known}))
