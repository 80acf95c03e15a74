"""Numerators of loss terms: a micro-batch's share of a part of the loss, so that shares add up."""

from __future__ import annotations

from xdsl.ir import SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.coefficient import Coefficient, LeafFactor, coefficient_of_factor
from secc.passes.loss.loss_context import LossContext
from secc.passes.loss.value_states import SumPart
from secc.runtime.plan.schema import SAMPLE_COUNT_SYMBOL

# What gives micro-batches their shares of a part that counts once for the whole batch: a symbol that counts
# rows, or a scalar of inputs that adds up over samples.
Share = str | LeafFactor


def make_numerator(
    context: LossContext, part: SumPart, shared_by: Share = SAMPLE_COUNT_SYMBOL
) -> tuple[SSAValue, Coefficient]:
    """The value that adds up over samples, in the shape of the part's atom, and its coefficient. A part that
    counts once for the whole batch counts in a micro-batch as the micro-batch's part of `shared_by` over that
    of the batch."""
    if part.summed:
        assert part.atom is not None
        return part.atom, part.coefficient
    if isinstance(shared_by, LeafFactor):
        assert part.atom is not None
        amount = as_scalar(context, shared_by.value)
        op = GlueOp.create_call("aten.mul.Tensor", [part.atom, amount], "$0, $1", [tensor_type(part.atom)])
        share = part.coefficient / coefficient_of_factor(shared_by)
        return context.pending.add_op(op).results[0], share
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


def as_scalar(context: LossContext, value: SSAValue) -> SSAValue:
    """Returns a value of one entry, without dims."""
    type = tensor_type(value)
    if not type.dims:
        return value
    flat = TensorType.from_dims([], type.dtype.data, type.requires_grad)
    return context.pending.add_op(
        GlueOp.create_call("aten.reshape.default", [value], "$0, []", [flat])
    ).results[0]
