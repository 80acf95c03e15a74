"""The estimate for a call that nobody measured: two FLOPs for each parameter and row, as in a stack of linear
layers.

It is used where a block cannot run on the meta device and in IR that was written by hand, and it is labelled
`default`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import BlockOp, CallOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type

SAVED_TENSORS_PER_RESULT = (
    16  # a transformer layer keeps about this many tensors of its result's size for backward
)
DEFAULT_OPS_PER_CALL = 20  # operations that a call issues
ZERO: Expr = size_expr.parse_expr("0")


@dataclass(frozen=True)
class CallCost:
    """Cost of one call: forward FLOPs, of which `attention` in one kernel; `work` and `attention_work`, the
    same as FLOPs of large products (`secc.cost.model.gemm_efficiency`), attention apart; bytes that other
    operations move; bytes saved for backward; operations issued; `label` is "counted", "sampled" (values of
    inputs decide, so the mean of samples) or "default".

    Where the call's `units` run again in the backward, it saves `kept` bytes, a unit's second run adds
    `working` bytes while it lasts, and all of them take `again` work and move `again_moved` bytes. `narrow`
    is the smallest dim of the weights that take longest, 0 if unknown. `in_turn`: no unit was seen to run
    twice or before one that stands ahead of it. `peak`: the most bytes that a call without a backward has
    made and still holds at once, its results among them.
    """

    flops: Expr
    work: Expr
    saved: Expr
    ops: int
    label: str
    units: int = 0
    kept: Expr = ZERO
    working: Expr = ZERO
    again: Expr = ZERO
    again_moved: Expr = ZERO
    attention: Expr = ZERO
    attention_work: Expr = ZERO
    moved: Expr = ZERO
    narrowest_dim: int = 0
    units_in_order: bool = True
    peak: Expr = ZERO


def default_call_cost(call: CallOp, block: BlockOp) -> CallCost:
    """The estimate from the block's parameters and the call's types."""
    return _cost_from_result_type(_widest_type(call), block.params.data)


@cache
def _cost_from_result_type(result: TensorType | None, params: int) -> CallCost:
    if result is None:
        return CallCost(ZERO, ZERO, ZERO, DEFAULT_OPS_PER_CALL, "default")
    rows = size_expr.parse_expr("1")
    for dim in result.shape[:-1] or result.shape:
        rows = rows * dim
    flops, one = 2 * params * rows, count_entries(result) * result.itemsize
    return CallCost(
        flops,
        flops,
        one * SAVED_TENSORS_PER_RESULT,
        DEFAULT_OPS_PER_CALL,
        "default",
        1,
        one,
        one * (SAVED_TENSORS_PER_RESULT - 1),
        flops,
    )


def count_entries(kind: TensorType) -> Expr:
    """The number of entries of a tensor."""
    total = size_expr.parse_expr("1")
    for dim in kind.shape:
        total = total * dim
    return total


def _widest_type(call: CallOp) -> TensorType | None:
    """The result (else operand) with the most dims, which tells the rows that pass through the block."""
    found = [tensor_type(v) for v in (call.results or call.operands)]
    return max(found, key=lambda kind: len(kind.dims), default=None)
