"""Default cost of a call that was not counted: two FLOPs per parameter and row, as for a stack of linear
layers.

Used for blocks that cannot run on the meta device and for IR written by hand. Labelled `default`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import BlockOp, CallOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type

# A transformer layer keeps about this many tensors of its result's size for backward.
SAVED_TENSORS_PER_RESULT = 16
DEFAULT_OPS_PER_CALL = 20
KEYS_AND_VALUES = 2  # tensors of the result's size, without grouped queries
ZERO: Expr = size_expr.parse_expr("0")


@dataclass(frozen=True)
class CallCost:
    """Cost of one call, as expressions over a micro-batch's symbols.

    flops: forward FLOPs, including `attention`, those inside fused attention kernels, and `routed`, those of
        experts in grouped products.
    work, attention_work, routed_work: the same FLOPs, weighted by the speed of products of their shapes
        (`secc.cost.model.gemm_efficiency`); `work` excludes attention.
    moved: bytes moved by all operations but products. saved: bytes kept for backward. ops: operations issued.
    label: "counted", "sampled" (the mean of dataset samples, because values of inputs decide) or "default".
    units: submodules that recomputation can run again. With all of them recomputed, the call keeps `kept`
        bytes, one second run adds `working` bytes while it lasts, and all second runs take `again` work and
        move `again_moved` bytes; `unneeded` is the work of products at their ends that they stop before.
    narrowest_dim: smallest dimension of the weight that takes most time; 0 if unknown.
    units_in_order: every unit ran at most once, in the order of declaration.
    exchanged: bytes of keys and values of all layers, each head once: what ranks exchange under cp. queries:
        those of queries and results, if they can exchange heads. key_heads: of keys, the largest common
        divisor of all layers; 0 if unknown.
    pieces: whole frames or windows that ranks of cp get, 0 if they get rows. `exchanged` leaves out layers
        that attend within them; the others attend to `parts`. entries: the size of the batch
        that the first layer works on; ranks may divide it in place of rows. unshared: bytes kept before the
        first layer, which each rank has whole.
    peak: for a call without backward, the most bytes it has allocated and not yet freed, including its
        results.
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
    unneeded: Expr = ZERO
    attention: Expr = ZERO
    attention_work: Expr = ZERO
    moved: Expr = ZERO
    narrowest_dim: int = 0
    units_in_order: bool = True
    peak: Expr = ZERO
    routed: Expr = ZERO
    routed_work: Expr = ZERO
    exchanged: Expr = ZERO
    queries: Expr = ZERO
    key_heads: int = 0
    pieces: Expr = ZERO
    parts: Expr = ZERO
    entries: Expr = ZERO
    unshared: Expr = ZERO


def default_call_cost(call: CallOp, block: BlockOp) -> CallCost:
    """Estimate a call from its block's parameter count and its result type."""
    return _cost_from_result_type(_widest_type(call), block.params.data)


@cache
def _cost_from_result_type(result: TensorType | None, params: int) -> CallCost:
    if result is None:
        return CallCost(ZERO, ZERO, ZERO, DEFAULT_OPS_PER_CALL, "default")
    rows = _rows_of_type(result)
    flops, result_bytes = 2 * params * rows, count_entries(result) * result.itemsize
    return CallCost(
        flops=flops,
        work=flops,
        saved=result_bytes * SAVED_TENSORS_PER_RESULT,
        ops=DEFAULT_OPS_PER_CALL,
        label="default",
        units=1,
        kept=result_bytes,
        working=result_bytes * (SAVED_TENSORS_PER_RESULT - 1),
        again=flops,
        exchanged=KEYS_AND_VALUES * result_bytes,
    )


def leading_rows(call: CallOp) -> Expr:
    """The number of rows of a call's result, as an expression."""
    result = _widest_type(call)
    return ZERO if result is None else _rows_of_type(result)


def _rows_of_type(result: TensorType) -> Expr:
    rows = size_expr.parse_expr("1")
    for dim in result.shape[:-1] or result.shape:
        rows = rows * dim
    return rows


def count_entries(type_: TensorType) -> Expr:
    """The number of entries of a tensor type, as an expression."""
    total = size_expr.parse_expr("1")
    for dim in type_.shape:
        total = total * dim
    return total


def _widest_type(call: CallOp) -> TensorType | None:
    """The result (or operand, if there is none) with the most dimensions: its leading ones count the rows."""
    types = [tensor_type(v) for v in (call.results or call.operands)]
    return max(types, key=lambda type_: len(type_.dims), default=None)
