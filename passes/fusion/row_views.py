"""Ops that move rows of logits, as `RowView`s, which apply to hidden states, labels and masks as well.

A tensor of entries has its tokens at dim `axis`; the other dims are its rows'. An op that mixes tokens and
rows has no view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from secc.ir.dialect.argument_template import OperandRef
from secc.ir.dialect.ops import Computation
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.fusion.formula import SHAPE_OPS, RowView
from secc.passes.loss.pending_ops import get_argument

DimShape = tuple[Expr, ...]
MOVE_OPS = SHAPE_OPS | {"slice", "select", "transpose", "t", "permute", "index", "index_select"}
MovedRows = tuple[RowView | None, int]  # what happens to rows, and where the tokens are then


def row_dims(shape: DimShape, axis: int | None) -> DimShape:
    """The dims of the rows; all dims where `axis` is None."""
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def read_move(op: Computation, axis: int | None) -> MovedRows | None:
    """What an op does to the rows of its operand 0 with tokens at `axis` (None: rows only), and where the
    tokens are afterwards; None if it mixes both."""
    before, after = tensor_type(op.operands[0]).shape, tensor_type(op.results[0]).shape
    if op.base_name in SHAPE_OPS:
        return _read_reshape(before, after, axis)
    if op.base_name in {"transpose", "t", "permute"}:
        return _read_permutation(_dim_order(op, len(before)), before, axis)
    if op.base_name == "index":
        return _read_index(op, after, axis)
    dim = int(get_argument(op, 1, "dim", 0)) % len(before)
    if dim == axis:
        return None
    place = dim - (axis is not None and dim > axis)
    if op.base_name == "slice":
        step = get_argument(op, 4, "step", 1)
        args = (
            place,
            get_argument(op, 2, "start"),
            get_argument(op, 3, "end"),
            *([] if step == 1 else [step]),
        )
        return RowView("slice", row_dims(after, axis), args), -1 if axis is None else axis
    if op.base_name == "select":
        new = -1 if axis is None else axis - (dim < axis)
        rows = row_dims(after, None if axis is None else new)
        if before[dim] == 1:
            return RowView("reshape", rows), new
        return RowView("select", rows, (place, get_argument(op, 2, "index"))), new
    return None


def _read_reshape(before: DimShape, after: DimShape, axis: int | None) -> MovedRows | None:
    if axis is None:
        return RowView("reshape", after), -1
    front = _product_of_dims(before[:axis])
    for new, size in enumerate(after):
        if size == before[axis] and _product_of_dims(after[:new]) == front:
            rows = row_dims(after, new)
            return (None if rows == row_dims(before, axis) else RowView("reshape", rows)), new
    return None


def _product_of_dims(dims: Sequence[Expr]) -> Expr:
    return sympy.expand(sympy.Mul(*dims))


def _dim_order(op: Computation, rank: int) -> list[int]:
    """The operand's dim of each dim of the result."""
    dims = list(range(rank))
    if op.base_name == "t":
        return dims[::-1]
    if op.base_name == "permute":
        return [int(d) % rank for d in get_argument(op, 1, "dims")]
    a, b = int(get_argument(op, 1, "dim0")) % rank, int(get_argument(op, 2, "dim1")) % rank
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _read_permutation(order: list[int], before: DimShape, axis: int | None) -> MovedRows:
    rows = [d for d in order if d != axis]
    new = -1 if axis is None else order.index(axis)
    if rows == sorted(rows):
        return None, new
    places = tuple(d - (axis is not None and d > axis) for d in rows)
    return RowView("permute", tuple(before[d] for d in rows), places), new


def _read_index(op: Computation, after: DimShape, axis: int | None) -> MovedRows | None:
    """Rows picked by masks or indices of the leading dims."""
    indices: list[Any] = op.arguments.args[1]
    if not all(isinstance(i, OperandRef) for i in indices):
        return None
    kinds = [tensor_type(op.operands[i.index]) for i in indices]
    taken = sum(len(kind.dims) if kind.dtype.data == "bool" else 1 for kind in kinds)
    if axis is not None and (axis < taken or axis != len(tensor_type(op.operands[0]).dims) - 1):
        return None
    last = None if axis is None else len(after) - 1
    return RowView(
        "index", row_dims(after, last), (), tuple(op.operands[i.index] for i in indices)
    ), -1 if last is None else last
