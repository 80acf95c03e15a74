"""Which tensors an edge can carry: by rows per sample, with every shape known on both sides from the samples' sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from secc.ir import expr
from secc.ir.dialect import GraphOp, KeyOp, SymbolOp, strings
from secc.ir.expr import Expr
from secc.ir.types import TensorType


@dataclass(frozen=True)
class Carry:
    """How a tensor travels: its sample dim, the rows of one sample, and "dim expression side" for dims cut to the sample's own extent."""

    dim: int
    rows: str
    extents: tuple[str, ...] = ()


class NotCarriable(Exception):
    """Why an edge cannot carry a tensor, as a sentence for people."""


def carry(graph: GraphOp, kind: TensorType) -> Carry:
    """How an edge carries a tensor of this type.

    One dim adds up over samples (`B`, `576*n_pixel_values`); the others are constant or, where micro-batches have their own widths
    (`widths "own"`), plain width symbols that can be cut. Raises NotCarriable.
    """
    rows = {name for name, s in graph.symbols.items() if s.kind.data == "rows"}
    shape = kind.shape
    sample_dims = [i for i, d in enumerate(shape) if expr.symbols(d) & rows]
    if len(sample_dims) != 1:
        raise NotCarriable(f"{'no dim' if not sample_dims else 'more than one dim'} of {_shape(kind)} counts samples")
    dim, own = sample_dims[0], graph.widths is None or graph.widths.data == "own"
    if not _adds_up(shape[dim], rows, set(graph.symbols) if own else rows):
        raise NotCarriable(f"the rows {expr.text(shape[dim])} do not add up over samples{' of different widths' if own else ''}")
    extents = tuple(_extent(graph, i, d) for i, d in enumerate(shape) if i != dim and expr.symbols(d)) if own else ()
    return Carry(dim, expr.text(shape[dim]), extents)


def can_send(graph: GraphOp, kind: TensorType, src_when: Sequence[str], dst_when: Sequence[str]) -> bool:
    """Whether an edge can carry a tensor of this type from a section active `src_when` to one active `dst_when`."""
    try:
        check_reach(graph, carry(graph, kind), src_when, dst_when)
    except NotCarriable:
        return False
    return True


def check_reach(graph: GraphOp, how: Carry, src_when: Sequence[str], dst_when: Sequence[str]) -> None:
    """Every sample for which the consumer wants rows must be one of the producer's. Raises NotCarriable."""
    covered = bool(dst_when) and set(dst_when) <= set(src_when)
    if src_when and not covered and not vanishes(graph, how.rows, src_when):
        raise NotCarriable(f"samples without {' and '.join(src_when)}, which the first does not see, have rows of it too")


def vanishes(graph: GraphOp, rows: str, absent: Sequence[str]) -> bool:
    """Whether a sample without the optional keys `absent` has no rows: what counts them has, or never lacks, one of these keys."""
    patterns = [set(strings(p.when)) for p in graph.patterns]

    def accompanied(key: str) -> bool:
        having = [p for p in patterns if key in p]
        return bool(having) and all(p & set(absent) for p in having)

    gone = [(expr.symbol(name), 0) for name, s in graph.symbols.items() if s.key.data in absent or accompanied(s.key.data)]
    return expr.parse(rows).subs(gone) == 0


def _adds_up(size: Expr, rows: set[str], banned: set[str]) -> bool:
    """Whether a size is a sum of rows symbols with factors in which no banned symbol occurs."""
    rest = sympy.expand(size)
    for name in rows:
        factor = rest.coeff(expr.symbol(name))
        if expr.symbols(factor) & (banned | rows):
            return False
        rest = sympy.expand(rest - factor * expr.symbol(name))
    return rest == 0


def _extent(graph: GraphOp, dim: int, size: Expr) -> str:
    if not isinstance(size, sympy.Symbol):
        raise NotCarriable(f"dim {dim}, {expr.text(size)}, cannot be cut to a sample's own width")
    return f"{dim} {size.name} {_side(graph, graph.symbols[size.name])}"


def _side(graph: GraphOp, symbol: SymbolOp) -> str:
    """The side on which `collate` pads a width: that of the key it is read from."""
    keys = [op for op in graph.body.block.ops if isinstance(op, KeyOp) and op.key == symbol.key]
    pads = [p.split(" ") for op in keys for p in strings(op.pads)]
    return next((side for dim, side, _ in pads if int(dim) == symbol.dim.data), "right")


def _shape(kind: TensorType) -> str:
    return f"[{', '.join(expr.text(d) for d in kind.shape)}]"
