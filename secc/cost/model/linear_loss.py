"""Cost of losses fused with their linear head: FLOPs with recomputed logits, bytes without stored logits.

Notation: N rows, hidden sizes H (student) and K (teacher), V vocabulary entries. The numbers follow the
tilings in `runtime/kernels`. One tile of logits counts as saved: it exists when memory peaks, in the backward
or (`linear_cross_entropy`, `linear_kl`) when gradients are computed together with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from secc.cost.model.default_estimate import count_entries
from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor_type

LINEAR_CROSS_ENTROPY = "secc.linear_cross_entropy"
LINEAR_CROSS_ENTROPY_ROWS = "secc.linear_cross_entropy_rows"
LINEAR_KL = "secc.linear_kl"
LINEAR_KL_CE = "secc.linear_kl_ce"
LOGITS_TILE_BYTES = 640 << 20  # logits of one model that exist at a time
TEACHER_TILE_BYTES = 112 << 20  # the teacher's
ROW_PARTS, LEAST_ROWS = 6, 1024  # a chunk of rows is this part of them, or as many
_WITH_THE_LOSS = (LINEAR_CROSS_ENTROPY, LINEAR_KL)  # gradients are, and are kept until backward
_CROSS_ENTROPIES = (LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_ROWS)
_SAVED_FLOATS_PER_ROW = dict.fromkeys(_CROSS_ENTROPIES, 2) | {
    LINEAR_CROSS_ENTROPY: 0,
    LINEAR_KL: 0,
    LINEAR_KL_CE: 7,
}  # in float32
_OPS_ISSUED = 20  # for a few tiles


@dataclass(frozen=True)
class FusedLossCost:
    """Cost of one fused loss: FLOPs of forward (`flops`) and `backward`, bytes `saved` for backward and
    `moved` in forward, operations issued."""

    flops: Expr
    backward: Expr
    saved: Expr
    moved: Expr
    ops: int = _OPS_ISSUED


def fused_loss_cost(op: GlueOp) -> FusedLossCost | None:
    """The cost of a fused loss on a linear head; None for any other operation."""
    name = op.target.data
    if name not in _SAVED_FLOATS_PER_ROW:
        return None
    hidden, weight = tensor_type(op.operands[0]), tensor_type(op.operands[1])
    rows, tokens = count_entries(hidden) / hidden.shape[-1], weight.shape[0]
    gradient_factors = hidden.requires_grad + weight.requires_grad
    logits, item = rows * tokens, hidden.itemsize
    student = 2 * count_entries(hidden) * tokens
    teacher = 0 if name in _CROSS_ENTROPIES else 2 * count_entries(tensor_type(op.operands[2])) * tokens
    logits_flops = student + teacher
    gradients = gradient_factors * student
    saved = item * count_entries(hidden) + 4 * _SAVED_FLOATS_PER_ROW[name] * rows + _tile_bytes(op)
    if name in _WITH_THE_LOSS:
        return FusedLossCost(
            flops=logits_flops + gradients,
            backward=sympy.Integer(0),
            saved=saved + item * count_entries(weight) * weight.requires_grad,
            moved=_moved_bytes(op, logits),
        )
    return FusedLossCost(
        flops=logits_flops,
        backward=logits_flops + gradients if gradient_factors else sympy.Integer(0),
        saved=saved,
        moved=_moved_bytes(op, logits),
    )


def _tile_bytes(op: GlueOp) -> Expr:
    """Bytes of logits that exist at a time, for both models; for 16-bit weights of many rows with the
    weight's gradient in float32, which is then summed over small chunks."""
    hidden, weight = tensor_type(op.operands[0]), tensor_type(op.operands[1])
    logits = hidden.itemsize * count_entries(hidden) / hidden.shape[-1] * weight.shape[0]
    if op.target.data == LINEAR_CROSS_ENTROPY_ROWS:
        return sympy.Min(logits, LOGITS_TILE_BYTES)
    most = LOGITS_TILE_BYTES + (4 * count_entries(weight) if hidden.itemsize < 4 else 0)
    least = sympy.Min(logits, LEAST_ROWS * hidden.itemsize * weight.shape[0])
    chunk = sympy.Max(least, sympy.Min(sympy.floor(logits / ROW_PARTS), most))
    return chunk if op.target.data == LINEAR_CROSS_ENTROPY else chunk + sympy.Min(logits, TEACHER_TILE_BYTES)


def _moved_bytes(op: GlueOp, logits: Expr) -> Expr:
    """Bytes moved in forward: operands are read; logits of each model are written and read, tile by tile."""
    read = sum(
        (count_entries(tensor_type(o)) * tensor_type(o).itemsize for o in op.operands), sympy.Integer(0)
    )
    models = 1 if op.target.data in _CROSS_ENTROPIES else 2
    return read + 2 * models * tensor_type(op.operands[0]).itemsize * logits
