"""Cost of activation recomputation: bytes kept until the backward, and the work of the second forward.

`full` runs every recomputation unit of every call again, `selective` every second layer of a stack
(`secc.runtime.sections.recompute`). See Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
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

# The fraction of layers that run again.
RECOMPUTED_LAYERS = {"none": Fraction(0), "selective": Fraction(1, 2), "full": Fraction(1)}


@dataclass(frozen=True)
class RecomputeCost:
    """Cost of one kind of recomputation, as expressions over a micro-batch's symbols.

    saved: bytes kept until the backward.
    working: additional bytes while one unit runs again.
    work: FLOPs of all second runs without those of experts, weighted by the speed of their products.
    ops, moved: operations and bytes moved of all second runs.
    unneeded: work of products at the ends of layers, after all that their backwards need: second runs stop
        before them, but not in every framework.
    """

    saved: str
    working: str
    work: str
    ops: int
    moved: str = "0"
    unneeded: str = "0"


@dataclass
class _RecomputeSum:
    """Running sums of one kind of recomputation over one case."""

    saved: Counter[str] = field(default_factory=Counter[str])
    working: set[str] = field(default_factory=set[str])
    work: Counter[str] = field(default_factory=Counter[str])
    moved: Counter[str] = field(default_factory=Counter[str])
    unneeded: Counter[str] = field(default_factory=Counter[str])
    ops: int = 0

    def add_recomputed_share(self, cost: CallCost, share: Fraction) -> None:
        """Add a call that runs the fraction `share` of its units again."""
        self.saved[_interpolate(cost.saved, cost.kept, share)] += 1
        self.work[_interpolate(ZERO, cost.again - cost.routed_work, share)] += 1
        self.unneeded[_interpolate(ZERO, cost.unneeded, share)] += 1
        self.moved[_interpolate(ZERO, cost.again_moved, share)] += 1
        self.ops += int(share * cost.ops)


@cache
def _interpolate(without: Expr, with_: Expr, share: Fraction) -> str:
    """Linear interpolation from `without` to `with_` by `share`."""
    return size_expr.format_expr(
        sympy.expand(without + sympy.Rational(share.numerator, share.denominator) * (with_ - without))
    )


@dataclass
class RecomputeAccumulator:
    """Running sums over one case, for each kind of recomputation."""

    full: _RecomputeSum = field(default_factory=_RecomputeSum)
    selective: _RecomputeSum = field(default_factory=_RecomputeSum)

    def add_call(self, cost: CallCost, alternate: bool) -> None:
        """Add a call. `alternate`: selective recomputation runs its block again, being one of every second
        in a row of equal blocks."""
        self.full.add_recomputed_share(cost, Fraction(cost.units > 0))
        self.full.working.add(size_expr.format_expr(cost.working))
        # Selective recomputation never takes the last layer. Its activations are freed before the first
        # second run starts, and make room for it, so `working` stays 0.
        alternate_units = cost.units // 2 if cost.units > 1 else cost.units * alternate
        share = Fraction(alternate_units, cost.units or 1)
        self.selective.add_recomputed_share(cost, share)

    def add_saved_bytes(self, size: str, count: int = 1) -> None:
        """Add bytes (an expression) that glue saves `count` times. Glue is never recomputed."""
        for kind in (self.full, self.selective):
            kind.saved[size] += count


def recompute_costs(sums: Sequence[RecomputeAccumulator]) -> dict[str, RecomputeCost]:
    """The cost of each kind of recomputation: the maximum over cases."""
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
        max_expr(sum_counted_exprs(s.unneeded) for s in sums),
    )


def selectively_recomputed_blocks(graph: GraphOp, paths: Iterable[str]) -> set[str]:
    """The blocks at `paths` that selective recomputation runs again: every second one in a row of equal
    blocks."""
    blocks = graph.blocks
    declared_paths = [p for p in paths if p in blocks]
    return set(select_alternate_blocks(declared_paths, {p: blocks[p].cls.data for p in declared_paths}))
