"""The number of labels that count in a classification loss: all that are not ignored, each with its class's
weight.

The divisor of a mean must be known before any forward. Labels that inputs or random numbers give are compared
with the ignored index; labels that glue computes (the argmax of a teacher's scores) are never negative, so
only a mask from inputs or random numbers can ignore them. Labels that a block returns (the codes of a
tokenizer) are taken for such, and a term of the loss is minus infinity if one of them is ignored after all;
not so labels of padded positions, which a micro-batch may lack. Any other number is a sum over the batch that
ops may read with `--global-sums`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from xdsl.ir import SSAValue

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import CallOp, Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.arithmetic import format_shape
from secc.passes.loss.coefficient import (
    UNIT_COEFFICIENT,
    Coefficient,
    LeafFactor,
    coefficient_of_factor,
)
from secc.passes.loss.loss_context import COUNT_TYPE, LossContext
from secc.passes.loss.op_tables import LABEL_LOSSES, REDUCTION_MEAN
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.value_states import SumPart

_NON_NEGATIVE_OPS = frozenset(
    {"argmax", "argmin", "topk", "sort", "argsort", "max", "min"}
)  # as indices, the last result
_LABEL_SHAPE_OPS = frozenset({
    "view", "_unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze", "clone", "contiguous",
    "alias", "detach", "slice", "select", "transpose", "permute", "t", "expand",
})  # fmt: skip
_ALL_ENTRIES_OPS = _LABEL_SHAPE_OPS - {"slice", "select"}
_PICKING_OPS = frozenset(
    {"index", "index_select", "gather", "repeat", "roll", "flip"}
)  # from their first operand
_COPYING_OPS = frozenset({"slice_scatter", "select_scatter", "stack", "cat", "copy"})  # from all operands


class AllLabels(Enum):
    """All labels count."""

    ALL = "all"


def count_labels(ctx: LossContext, op: Computation) -> Coefficient | None:
    """The number of labels that count in `op`, a loss on (scores, labels, weight); None where inputs alone do
    not determine it."""
    labels = op.operands[1]
    mask = mask_counted_labels(ctx, op, labels, get_argument(op, 4, "ignore_index", -100))
    if len(op.operands) > 2:
        if isinstance(mask, SSAValue) and ctx.is_known_ahead(labels) and ctx.is_input_only(op.operands[2]):
            return coefficient_of_factor(LeafFactor(_sum_label_weights(ctx, op, mask)))
        return None
    return _count_by_mask(ctx, op, labels, mask)


def count_unignored(ctx: LossContext, op: Computation) -> Coefficient | None:
    """The number of labels that `op` counts, a sum of `labels != ignored` as label smoothing divides by; None
    for other sums, and where inputs alone do not determine the number.

    Labels of a block count if a mean over classes takes them, too: that one is guarded by
    `check_block_labels`.
    """
    mask = op.operands[0].owner
    if not isinstance(mask, GlueOp) or len(tensor_type(op.results[0]).dims):
        return None
    if mask.base_name in {"bitwise_not", "logical_not"}:
        mask = mask.operands[0].owner
        wanted = "eq"
    else:
        wanted = "ne"
    if not isinstance(mask, GlueOp) or mask.base_name != wanted or len(mask.operands) != 1:
        return None
    labels, ignored = mask.operands[0], mask.arguments.args[1]
    if ctx.is_known_ahead(labels) or not isinstance(ignored, int):
        return None
    if _labels_from_blocks(labels) and not _has_guarded_mean(labels, ignored):
        return None
    return _count_by_mask(ctx, op, labels, mask_counted_labels(ctx, op, labels, ignored))


def _has_guarded_mean(labels: SSAValue, ignored: int) -> bool:
    """Whether a mean over classes takes labels, in any shape, and ignores the same index."""
    for use in labels.uses:
        taker = use.operation
        if not isinstance(taker, GlueOp):
            continue
        if taker.base_name in _ALL_ENTRIES_OPS and _has_guarded_mean(taker.results[0], ignored):
            return True
        if (
            taker.base_name in LABEL_LOSSES
            and use.index == 1
            and get_argument(taker, 3, "reduction", REDUCTION_MEAN) == REDUCTION_MEAN
            and get_argument(taker, 4, "ignore_index", -100) == ignored
        ):
            return True
    return False


def _count_by_mask(
    ctx: LossContext, op: Computation, labels: SSAValue, mask: SSAValue | AllLabels | None
) -> Coefficient | None:
    """The number of labels that a mask of `mask_counted_labels` counts; None without one."""
    if isinstance(mask, AllLabels):
        return ctx.entry_count(tensor_type(labels), range(len(tensor_type(labels).dims)))
    if mask is None:
        return None
    count = ctx.pending.make_glue(op, "aten.sum.default", [mask], "$0", COUNT_TYPE)
    return coefficient_of_factor(LeafFactor(count))


def sum_counted_labels(ctx: LossContext, op: Computation) -> SSAValue:
    """The number of labels in a micro-batch that count in `op`, a loss on (scores, labels, weight), each with
    its class's weight: a floating-point scalar."""
    labels, ignored = op.operands[1], get_argument(op, 4, "ignore_index", -100)
    type = TensorType.from_dims(tensor_type(labels).shape, "bool")
    mask = ctx.pending.make_glue(op, "aten.ne.Scalar", [labels], f"$0, {ignored}", type)
    if len(op.operands) > 2:  # torch gives weights no gradient
        total = _sum_label_weights(ctx, op, mask)
        return ctx.pending.make_glue(op, "aten.detach.default", [total], "$0", tensor_type(total))
    dtype = tensor_type(op.results[0])
    args, one = f"$0, dtype=torch.{dtype.torch_dtype}", TensorType.from_dims([], dtype.dtype.data)
    return ctx.pending.make_glue(op, "aten.sum.default", [mask], args, one)


def check_block_labels(ctx: LossContext, op: Computation) -> list[SumPart]:
    """Parts of the loss that are 0, or minus infinity if a block returned the ignored index among the labels
    of `op`, a loss on (scores, labels), so that its divisor is not their number."""
    ignored = get_argument(op, 4, "ignore_index", -100)
    parts: list[SumPart] = []
    for found in _labels_from_blocks(op.operands[1]):
        for target, args, type in (
            ("aten.ne.Scalar", f"$0, {ignored}", TensorType.from_dims(tensor_type(found).shape, "bool")),
            ("aten.all.default", "$0", TensorType.from_dims([], "bool")),
            ("aten._to_copy.default", "$0, dtype=torch.float32", TensorType.from_dims([], "f32")),
            ("aten.log.default", "$0", TensorType.from_dims([], "f32")),
        ):
            found = ctx.pending.make_glue(op, target, [found], args, type)
        assert isinstance(found.owner, GlueOp)
        parts.append(SumPart(UNIT_COEFFICIENT, found, True, found.owner))
    return parts


def _labels_from_blocks(labels: SSAValue) -> list[SSAValue]:
    """What `mask_counted_labels` takes for labels that all count, since a block returned them: the block's
    result, or that plus a number."""
    maker = labels.owner
    if isinstance(maker, CallOp):
        return [labels]
    if not isinstance(maker, GlueOp):
        return []
    operands = list(maker.operands)
    match maker.base_name:
        case "add" if len(operands) == 1:
            return [labels] if _labels_from_blocks(operands[0]) else []
        case "where":
            operands = operands[1:]
        case "masked_scatter":
            operands = [operands[0], operands[2]]
        case "cat":
            pass
        case name if name in _LABEL_SHAPE_OPS | {"masked_fill"}:
            operands = operands[:1]
        case _:
            return []
    return [found for operand in operands for found in _labels_from_blocks(operand)]


def _sum_label_weights(ctx: LossContext, op: Computation, mask: SSAValue) -> SSAValue:
    """The sum over counted labels of their classes' weights."""
    labels, weight = op.operands[1], op.operands[2]
    shape, dtype = tensor_type(labels).shape, tensor_type(weight).dtype.data
    # An ignored label may be no class, such as 255.
    classes = ctx.pending.make_glue(op, "aten.mul.Tensor", [labels, mask], "$0, $1", tensor_type(labels))
    weights = ctx.pending.make_glue(
        op, "aten.index.Tensor", [weight, classes], "$0, [$1]", TensorType.from_dims(shape, dtype)
    )
    weights = ctx.pending.make_glue(
        op, "aten.mul.Tensor", [weights, mask], "$0, $1", TensorType.from_dims(shape, dtype)
    )
    return ctx.pending.make_glue(op, "aten.sum.default", [weights], "$0", TensorType.from_dims([], dtype))


def mask_counted_labels(
    ctx: LossContext, op: Computation, labels: SSAValue, ignored: Any
) -> SSAValue | AllLabels | None:
    """A mask, computed from inputs and random numbers alone, of the labels that are not `ignored`; None where
    there is no such mask."""
    type = TensorType.from_dims(tensor_type(labels).shape, "bool")
    if ctx.is_known_ahead(labels):
        return ctx.pending.make_glue(op, "aten.ne.Scalar", [labels], f"$0, {ignored}", type)
    maker = labels.owner
    if not isinstance(ignored, int):
        return None
    if labels in _labels_from_blocks(labels):  # guarded by `check_block_labels`
        return None if ctx.has_padded_dim(type) else AllLabels.ALL
    if not isinstance(maker, GlueOp):
        return None
    if ignored < 0 and _is_never_negative(labels):
        return AllLabels.ALL
    if maker.base_name in _LABEL_SHAPE_OPS and len(maker.operands) == 1:
        inner = mask_counted_labels(ctx, op, maker.operands[0], ignored)
        return (
            ctx.pending.make_glue(op, maker.target.data, [inner], maker.args.data, type)
            if isinstance(inner, SSAValue)
            else inner
        )
    if maker.base_name == "cat":
        return _mask_of_joined(ctx, op, maker, ignored, type)
    if maker.base_name == "masked_scatter":
        base, places, rows = maker.operands
        if mask_counted_labels(ctx, op, rows, ignored) is not AllLabels.ALL:
            return None
        return _choose_mask(ctx, op, places, AllLabels.ALL, mask_counted_labels(ctx, op, base, ignored), type)
    if maker.base_name == "where" and len(maker.operands) == 3:
        chosen = [mask_counted_labels(ctx, op, labels, ignored) for labels in maker.operands[1:]]
        if (mask := _choose_mask(ctx, op, maker.operands[0], chosen[0], chosen[1], type)) is not None:
            return mask
    return _mask_of_filled(ctx, op, maker, ignored, type)


def _mask_of_joined(
    ctx: LossContext, op: Computation, maker: GlueOp, ignored: int, type: TensorType
) -> SSAValue | AllLabels | None:
    """The mask of labels that `maker` joins: a prompt, and what a model went on with."""
    masks = [mask_counted_labels(ctx, op, labels, ignored) for labels in maker.operands]
    if all(isinstance(m, AllLabels) for m in masks):
        return AllLabels.ALL
    joined = list[SSAValue]()
    for labels, mask in zip(maker.operands, masks, strict=True):
        if mask is None:
            return None
        joined.append(_write_mask(ctx, op, mask, tensor_type(labels)))
    return ctx.pending.make_glue(op, "aten.cat.default", joined, maker.args.data, type)


def _choose_mask(
    ctx: LossContext,
    op: Computation,
    places: SSAValue,
    there: SSAValue | AllLabels | None,
    elsewhere: SSAValue | AllLabels | None,
    type: TensorType,
) -> SSAValue | AllLabels | None:
    """The mask of labels that are taken from one tensor at `places`, and from another elsewhere."""
    if there is None or elsewhere is None or not ctx.is_known_ahead(places):
        return None
    if isinstance(there, AllLabels) and isinstance(elsewhere, AllLabels):
        return AllLabels.ALL
    masks = [_write_mask(ctx, op, mask, type) for mask in (there, elsewhere)]
    return ctx.pending.make_glue(op, "aten.where.self", [places, *masks], "$0, $1, $2", type)


def _write_mask(
    ctx: LossContext, op: Computation, mask: SSAValue | AllLabels, labels: TensorType
) -> SSAValue:
    """The mask as a tensor in the shape of `labels`."""
    if not isinstance(mask, AllLabels):
        return mask
    kind = TensorType.from_dims(labels.shape, "bool")
    return ctx.pending.make_glue(op, "aten.ones.default", [], f"{format_shape(kind)}, dtype=torch.bool", kind)


def _is_never_negative(value: SSAValue) -> bool:
    """Whether a tensor holds indices that glue computed, non-negative numbers, and copies of such: the codes
    of a nearest-neighbour search, shifted into a larger tensor and picked by a mask."""
    maker = value.owner
    if not isinstance(maker, GlueOp):
        return False
    arguments, name = maker.arguments, maker.base_name.removeprefix("new_").removesuffix("_like")
    if name in _NON_NEGATIVE_OPS:
        return value is maker.results[-1]
    if name in {"zeros", "ones"}:
        return True
    if name == "full":
        number = arguments.get(2 if maker.base_name == "new_full" else 1, "fill_value")
        return isinstance(number, int | float) and number >= 0
    if name == "add" and len(maker.operands) == 1:
        number = arguments.args[1]
        return isinstance(number, int | float) and number >= 0 and _is_never_negative(maker.operands[0])
    if name in _LABEL_SHAPE_OPS | _PICKING_OPS:
        return _is_never_negative(maker.operands[0])
    return name in _COPYING_OPS and all(map(_is_never_negative, maker.operands))


def _mask_of_filled(
    ctx: LossContext, op: Computation, maker: GlueOp, ignored: int, type: TensorType
) -> SSAValue | None:
    """The mask of labels that `masked_fill(labels, mask, ignored)` or `where(mask, labels, ignored)`
    leaves."""
    values = [
        maker.operands[a.index] if isinstance(a, argument_template.OperandRef) else a
        for a in maker.arguments.args
    ]
    if (
        len(values) != 3
        or ctx.literal_value(values[2]) != ignored
        or maker.base_name not in {"masked_fill", "where"}
    ):
        return None
    labels, mask = values[:2] if maker.base_name == "masked_fill" else (values[1], values[0])
    if not isinstance(labels, SSAValue) or not ctx.is_known_ahead(mask):
        return None
    inner = mask_counted_labels(ctx, op, labels, ignored)
    if inner is None:
        return None
    kept = (
        mask
        if maker.base_name == "where"
        else ctx.pending.make_glue(op, "aten.logical_not.default", [mask], "$0", tensor_type(mask))
    )
    if isinstance(inner, SSAValue):
        return ctx.pending.make_glue(op, "aten.logical_and.default", [inner, kept], "$0, $1", type)
    return ctx.pending.make_glue(op, "aten.expand.default", [kept], f"$0, {format_shape(type)}", type)
