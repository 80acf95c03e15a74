"""How many labels of a classification loss count: those that are not ignored, each with its class's weight.

The divisor of a mean must be known before any forward. Labels made of inputs are compared with the ignored
index; labels that a block decides (the argmax of a teacher) are never negative, so only a mask made of inputs
can ignore them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from xdsl.ir import SSAValue

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.loss.coefficient import Coefficient, Leaf, of_factor
from secc.passes.loss.loss_context import COUNT, Context
from secc.passes.loss.pending_ops import argument

_NOT_NEGATIVE = frozenset(
    {"argmax", "argmin", "topk", "sort", "argsort", "max", "min"}
)  # as indices, the last result
_SHAPES = frozenset({
    "view", "_unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze", "clone", "contiguous", "alias", "detach", "slice", "select",
    "transpose", "permute", "t", "expand",
})  # fmt: skip


class All(Enum):
    """All labels count."""

    ALL = "all"


def count(ctx: Context, op: Computation) -> Coefficient | None:
    """The number of labels that `op`, a loss on (scores, labels, weight), counts; None where inputs alone do
    not decide it."""
    labels = op.operands[1]
    mask = counted(ctx, op, labels, argument(op, 4, "ignore_index", -100))
    if len(op.operands) > 2:
        if isinstance(mask, SSAValue) and ctx.input_only(labels) and ctx.input_only(op.operands[2]):
            return of_factor(Leaf(_weighted(ctx, op, mask)))
        return None
    if isinstance(mask, All):
        return ctx.entries(tensor(labels), range(len(tensor(labels).dims)))
    return (
        None if mask is None else of_factor(Leaf(ctx.shop.glue(op, "aten.sum.default", [mask], "$0", COUNT)))
    )


def _weighted(ctx: Context, op: Computation, mask: SSAValue) -> SSAValue:
    """The sum over counted labels of their classes' weights."""
    labels, weight = op.operands[1], op.operands[2]
    shape, dtype = tensor(labels).shape, tensor(weight).dtype.data
    classes = ctx.shop.glue(op, "aten.clamp_min.default", [labels], "$0, 0", tensor(labels))
    weights = ctx.shop.glue(
        op, "aten.index.Tensor", [weight, classes], "$0, [$1]", TensorType.of(shape, dtype)
    )
    weights = ctx.shop.glue(op, "aten.mul.Tensor", [weights, mask], "$0, $1", TensorType.of(shape, dtype))
    return ctx.shop.glue(op, "aten.sum.default", [weights], "$0", TensorType.of([], dtype))


def counted(ctx: Context, op: Computation, labels: SSAValue, ignored: Any) -> SSAValue | All | None:
    """A mask, made of inputs alone, of the labels that are not `ignored`."""
    type = TensorType.of(tensor(labels).shape, "bool")
    if ctx.input_only(labels):
        return ctx.shop.glue(op, "aten.ne.Scalar", [labels], f"$0, {ignored}", type)
    maker = labels.owner
    if not isinstance(maker, GlueOp) or not isinstance(ignored, int):
        return None
    if maker.base in _NOT_NEGATIVE and ignored < 0 and labels is maker.results[-1]:
        return All.ALL
    if maker.base in _SHAPES and len(maker.operands) == 1:
        inner = counted(ctx, op, maker.operands[0], ignored)
        return (
            ctx.shop.glue(op, maker.target.data, [inner], maker.args.data, type)
            if isinstance(inner, SSAValue)
            else inner
        )
    return _filled(ctx, op, maker, ignored, type)


def _filled(ctx: Context, op: Computation, maker: GlueOp, ignored: int, type: TensorType) -> SSAValue | None:
    """The mask of labels that `masked_fill(labels, mask, ignored)` or `where(mask, labels, ignored)`
    leaves."""
    values = [
        maker.operands[a.index] if isinstance(a, argument_template.Ref) else a for a in maker.arguments.args
    ]
    if len(values) != 3 or ctx.literal(values[2]) != ignored or maker.base not in {"masked_fill", "where"}:
        return None
    labels, mask = values[:2] if maker.base == "masked_fill" else (values[1], values[0])
    if not isinstance(labels, SSAValue) or not ctx.input_only(mask):
        return None
    inner = counted(ctx, op, labels, ignored)
    if inner is None:
        return None
    kept = (
        mask
        if maker.base == "where"
        else ctx.shop.glue(op, "aten.logical_not.default", [mask], "$0", tensor(mask))
    )
    if isinstance(inner, SSAValue):
        return ctx.shop.glue(op, "aten.logical_and.default", [inner, kept], "$0, $1", type)
    sizes = argument_template.format(argument_template.Arguments([list(type.shape)]))
    return ctx.shop.glue(op, "aten.expand.default", [kept], f"$0, {sizes}", type)
