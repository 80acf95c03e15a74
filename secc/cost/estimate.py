"""The estimate for a call that nobody measured: two FLOPs for each parameter and row, as in a stack of linear layers.

It is used where a block cannot run on the meta device and in IR that was written by hand, and it is labelled `default`.
"""

from __future__ import annotations

from dataclasses import dataclass

from secc.ir import expr
from secc.ir.dialect import BlockOp, CallOp
from secc.ir.expr import Expr
from secc.ir.types import TensorType, tensor

SAVED_PER_RESULT = 16  # a transformer layer keeps about this many tensors of its result's size for backward
OPS = 20  # operations that a call issues


@dataclass(frozen=True)
class CallCost:
    """Cost of one call: forward FLOPs, bytes saved for backward, operations issued; `label` is "counted" or "default".

    Where the call's `units` run again in the backward, it saves `kept` bytes, a unit's second run adds `working` bytes while it lasts, and
    all of them take `again` FLOPs.
    """

    flops: Expr
    saved: Expr
    ops: int
    label: str
    units: int
    kept: Expr
    working: Expr
    again: Expr


def default(call: CallOp, block: BlockOp) -> CallCost:
    """The estimate from the block's parameters and the call's types."""
    result = _widest(call)
    zero = expr.parse("0")
    if result is None:
        return CallCost(zero, zero, OPS, "default", 0, zero, zero, zero)
    rows = expr.parse("1")
    for dim in result.shape[:-1] or result.shape:
        rows = rows * dim
    flops, one = 2 * block.params.data * rows, entries(result) * result.itemsize
    return CallCost(flops, one * SAVED_PER_RESULT, OPS, "default", 1, one, one * (SAVED_PER_RESULT - 1), flops)


def entries(kind: TensorType) -> Expr:
    """The number of entries of a tensor."""
    total = expr.parse("1")
    for dim in kind.shape:
        total = total * dim
    return total


def _widest(call: CallOp) -> TensorType | None:
    """The result (else operand) with the most dims, which tells the rows that pass through the block."""
    found = [tensor(v) for v in (call.results or call.operands)]
    return max(found, key=lambda kind: len(kind.dims), default=None)
