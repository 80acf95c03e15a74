"""Numerators of loss terms: a micro-batch's share of a part of the loss, so that shares add up."""

from __future__ import annotations

from xdsl.ir import SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.coefficient import Coefficient
from secc.passes.loss.loss_context import LossContext
from secc.passes.loss.value_states import SumPart

SAMPLE_COUNT_SYMBOL = "B"


def make_numerator(
    context: LossContext, part: SumPart, shared_by: str = SAMPLE_COUNT_SYMBOL
) -> tuple[SSAValue, Coefficient]:
    """The value that adds up over samples, in the shape of the part's atom, and its coefficient. What counts
    once for the whole batch counts 1/n for each of the n rows that the symbol `shared_by` counts."""
    if part.summed:
        assert part.atom is not None
        return part.atom, part.coefficient
    share = part.coefficient / Coefficient(size=size_expr.size_symbol(shared_by))
    if part.atom is None:
        op = GlueOp.create_call(
            "aten.full.default",
            [],
            f"[], {shared_by}, dtype=torch.float32, device=device",
            [TensorType.from_dims([], "f32")],
        )
    else:
        type = tensor_type(part.atom)
        op = GlueOp.create_call("aten.mul.Tensor", [part.atom], f"$0, {shared_by}", [type])
    return context.pending.add_op(op).results[0], share
