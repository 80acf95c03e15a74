"""What fused losses on linear heads cost: FLOPs with the logits that are computed again, and bytes without
the logits.

For N rows, hidden sizes H (student) and K (teacher) and V tokens; `runtime/kernels` has the tilings that
these numbers follow. A tile of logits counts as kept, because it exists when memory is fullest, in the
backward or (`linear_kl`) when gradients are made with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from secc.cost.model.default_estimate import count_entries
from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor_type

LINEAR_CROSS_ENTROPY, LINEAR_KL, LINEAR_KL_CE = (
    "secc.linear_cross_entropy",
    "secc.linear_kl",
    "secc.linear_kl_ce",
)
LOGITS_TILE_BYTES = 640 << 20  # of one model's logits that exist at a time
_SAVED_FLOATS_PER_ROW = {
    LINEAR_CROSS_ENTROPY: 2,
    LINEAR_KL: 0,
    LINEAR_KL_CE: 7,
}  # float32 numbers that are kept for each row
_OPS_ISSUED = 20  # operations issued for a few tiles


@dataclass(frozen=True)
class FusedLossCost:
    """Of one fused loss: `flops` and `backward` FLOPs, bytes `saved` for backward, bytes `moved` in forward,
    operations issued."""

    flops: Expr
    backward: Expr
    saved: Expr
    moved: Expr
    ops: int = _OPS_ISSUED


def fused_loss_cost(op: GlueOp) -> FusedLossCost | None:
    """The cost of a fused loss on a head, None for any other op."""
    name = op.target.data
    if name not in _SAVED_FLOATS_PER_ROW:
        return None
    hidden, weight = tensor_type(op.operands[0]), tensor_type(op.operands[1])
    rows, tokens = count_entries(hidden) / hidden.shape[-1], weight.shape[0]
    wanted = hidden.requires_grad + weight.requires_grad
    logits, item = rows * tokens, hidden.itemsize
    student = 2 * count_entries(hidden) * tokens
    both = (
        student
        if name == LINEAR_CROSS_ENTROPY
        else student + 2 * count_entries(tensor_type(op.operands[2])) * tokens
    )
    gradients = wanted * student
    tile = sympy.Min(item * logits, LOGITS_TILE_BYTES) * (1 if name == LINEAR_CROSS_ENTROPY else 2)
    kept = item * count_entries(hidden) + 4 * _SAVED_FLOATS_PER_ROW[name] * rows + tile
    if name == LINEAR_KL:  # gradients are made with the loss and wait for backward
        return FusedLossCost(
            both + gradients,
            sympy.Integer(0),
            kept + item * count_entries(weight) * weight.requires_grad,
            _moved_bytes(op, logits),
        )
    return FusedLossCost(
        both, both + gradients if wanted else sympy.Integer(0), kept, _moved_bytes(op, logits)
    )


def _moved_bytes(op: GlueOp, logits: Expr) -> Expr:
    """Operands are read, and each model's logits written and read, tile by tile."""
    read = sum(
        (count_entries(tensor_type(o)) * tensor_type(o).itemsize for o in op.operands), sympy.Integer(0)
    )
    models = 1 if op.target.data == LINEAR_CROSS_ENTROPY else 2
    return read + 2 * models * tensor_type(op.operands[0]).itemsize * logits
