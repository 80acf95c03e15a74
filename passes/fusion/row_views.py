"""Ops that move rows of logits, read as `View`s, which apply to hidden states, labels and masks alike.

A tensor of entries has its tokens at dim `axis`; what is left are its rows' dims. An op that mixes tokens and
rows has no view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from secc.ir.dialect.argument_template import Ref
from secc.ir.dialect.ops import Computation
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor
from secc.passes.fusion.formula import SHAPES, View
from secc.passes.loss.pending_ops import argument

Shape = tuple[Expr, ...]
MOVES = SHAPES | {"slice", "select", "transpose", "t", "permute", "index", "index_select"}
Moved = tuple[View | None, int]  # what happens to rows, and where the tokens are then


def rows_of(shape: Shape, axis: int | None) -> Shape:
    """The dims of the rows; all dims where there is no dim of tokens."""
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def moved(op: Computation, axis: int | None) -> Moved | None:
    """What an op does to the rows of its operand 0, whose tokens are at `axis` (None: it has rows only); None
    if it mixes both."""
    before, after = tensor(op.operands[0]).shape, tensor(op.results[0]).shape
    if op.base in SHAPES:
        return _reshaped(before, after, axis)
    if op.base in {"transpose", "t", "permute"}:
        return _permuted(_order(op, len(before)), before, axis)
    if op.base == "index":
        return _indexed(op, after, axis)
    dim = int(argument(op, 1, "dim", 0)) % len(before)
    if dim == axis:
        return None
    place = dim - (axis is not None and dim > axis)
    if op.base == "slice":
        step = argument(op, 4, "step", 1)
        args = (place, argument(op, 2, "start"), argument(op, 3, "end"), *([] if step == 1 else [step]))
        return View("slice", rows_of(after, axis), args), -1 if axis is None else axis
    if op.base == "select":
        new = -1 if axis is None else axis - (dim < axis)
        return View(
            "select", rows_of(after, None if axis is None else new), (place, argument(op, 2, "index"))
        ), new
    return None


def _reshaped(before: Shape, after: Shape, axis: int | None) -> Moved | None:
    if axis is None:
        return View("reshape", after), -1
    front = _product(before[:axis])
    for new, size in enumerate(after):
        if size == before[axis] and _product(after[:new]) == front:
            rows = rows_of(after, new)
            return (None if rows == rows_of(before, axis) else View("reshape", rows)), new
    return None


def _product(dims: Sequence[Expr]) -> Expr:
    return sympy.expand(sympy.Mul(*dims))


def _order(op: Computation, rank: int) -> list[int]:
    """Which dim of the operand each dim of the result is."""
    dims = list(range(rank))
    if op.base == "t":
        return dims[::-1]
    if op.base == "permute":
        return [int(d) % rank for d in argument(op, 1, "dims")]
    a, b = int(argument(op, 1, "dim0")) % rank, int(argument(op, 2, "dim1")) % rank
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _permuted(order: list[int], before: Shape, axis: int | None) -> Moved:
    rows = [d for d in order if d != axis]
    new = -1 if axis is None else order.index(axis)
    if rows == sorted(rows):
        return None, new
    places = tuple(d - (axis is not None and d > axis) for d in rows)
    return View("permute", tuple(before[d] for d in rows), places), new


def _indexed(op: Computation, after: Shape, axis: int | None) -> Moved | None:
    """Rows picked by masks or indices of the leading dims."""
    indices: list[Any] = op.arguments.args[1]
    if not all(isinstance(i, Ref) for i in indices):
        return None
    kinds = [tensor(op.operands[i.index]) for i in indices]
    taken = sum(len(kind.dims) if kind.dtype.data == "bool" else 1 for kind in kinds)
    if axis is not None and (axis < taken or axis != len(tensor(op.operands[0]).dims) - 1):
        return None
    last = None if axis is None else len(after) - 1
    return View(
        "index", rows_of(after, last), (), tuple(op.operands[i.index] for i in indices)
    ), -1 if last is None else last
