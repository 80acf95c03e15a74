"""What fused losses on linear heads cost: FLOPs with the logits that are computed again, and bytes without
the logits.

For N rows, hidden sizes H (student) and K (teacher) and V tokens; `runtime/kernels` has the tilings that
these numbers follow. A tile of logits counts as kept, because it exists when memory is fullest, in the
backward or (`linear_kl`) when gradients are made with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from secc.cost.model.default_estimate import entries
from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor

CROSS_ENTROPY, KL, BOTH = "secc.linear_cross_entropy", "secc.linear_kl", "secc.linear_kl_ce"
TILE_BYTES = 640 << 20  # of one model's logits that exist at a time
_NUMBERS = {CROSS_ENTROPY: 2, KL: 0, BOTH: 7}  # float32 numbers that are kept for each row
_OPS = 20  # operations issued for a few tiles


@dataclass(frozen=True)
class FusedCost:
    """Of one fused loss: `flops` and `backward` FLOPs, bytes `saved` for backward, bytes `moved` in forward,
    operations issued."""

    flops: Expr
    backward: Expr
    saved: Expr
    moved: Expr
    ops: int = _OPS


def fused_cost(op: GlueOp) -> FusedCost | None:
    """The cost of a fused loss on a head, None for any other op."""
    name = op.target.data
    if name not in _NUMBERS:
        return None
    hidden, weight = tensor(op.operands[0]), tensor(op.operands[1])
    rows, tokens = entries(hidden) / hidden.shape[-1], weight.shape[0]
    wanted = hidden.requires_grad + weight.requires_grad
    logits, item = rows * tokens, hidden.itemsize
    student = 2 * entries(hidden) * tokens
    both = student if name == CROSS_ENTROPY else student + 2 * entries(tensor(op.operands[2])) * tokens
    gradients = wanted * student
    tile = sympy.Min(item * logits, TILE_BYTES) * (1 if name == CROSS_ENTROPY else 2)
    kept = item * entries(hidden) + 4 * _NUMBERS[name] * rows + tile
    if name == KL:  # gradients are made with the loss and wait for backward
        return FusedCost(
            both + gradients,
            sympy.Integer(0),
            kept + item * entries(weight) * weight.requires_grad,
            _moved(op, logits),
        )
    return FusedCost(both, both + gradients if wanted else sympy.Integer(0), kept, _moved(op, logits))


def _moved(op: GlueOp, logits: Expr) -> Expr:
    """Operands are read, and each model's logits written and read, tile by tile."""
    read = sum((entries(tensor(o)) * tensor(o).itemsize for o in op.operands), sympy.Integer(0))
    models = 1 if op.target.data == CROSS_ENTROPY else 2
    return read + 2 * models * tensor(op.operands[0]).itemsize * logits
