"""Weights of rows that depend on how often their label is in the batch: `w = 1 / counts; w[labels]`.

The counts of the batch are known before any forward, so each class has a coefficient, and the weights of
the rows are a sum over the classes, of the coefficient times whether the label of the row is this class. So a
weighted sum of losses is one term for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.arithmetic import coefficient_of_entry, count_few_entries
from secc.passes.loss.coefficient import (
    SCALAR_TYPE,
    UNIT_COEFFICIENT,
    AppliedFactor,
    Coefficient,
    LeafFactor,
    coefficient_of_factor,
    sum_coefficients,
)
from secc.passes.loss.loss_context import LossContext
from secc.passes.loss.op_tables import ENTRYWISE_OPS, REDUCTION_MEAN, REDUCTION_NONE
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.value_states import LocalState, PickedEntries, SumPart, SumState, ValueState


def pick_entries(ctx: LossContext, op: Computation) -> ValueState | None:
    """The state of entries of a short vector, one for each label, `vector[labels]`; None where an entry is
    not known before any forward, or the labels are no rows of numbers."""
    vector, labels = op.operands[0], op.operands[1]
    is_number = not tensor_type(labels).is_floating and tensor_type(labels).dtype.data != "bool"
    if len(op.operands) > 2 or not is_number or not ctx.carries_samples(labels):
        return None
    coefficients = _entries_of(ctx, op, vector)
    return None if coefficients is None else _picked_state(ctx, op, PickedEntries(labels, coefficients))


def apply_to_picked(ctx: LossContext, op: Computation) -> ValueState | None:
    """The state of an op on picked entries and numbers: the op on each coefficient. None for others."""
    if not isinstance(op, GlueOp) or op.base_name not in ENTRYWISE_OPS or len(op.results) != 1:
        return None
    found = [ctx.picked[o] for o in op.operands if o in ctx.picked]
    if len(found) == 1 and op.base_name == "div" and (divided := _divide_rows(ctx, op)) is not None:
        return divided
    if len(found) != 1 or tensor_type(op.results[0]).shape != tensor_type(found[0].labels).shape:
        return None
    columns = [
        found[0].coefficients
        if operand in ctx.picked
        else (ctx.coefficient_of(operand),) * len(found[0].coefficients)
        for operand in op.operands
    ]
    coefficients = list[Coefficient]()
    for entries in zip(*columns, strict=True):
        known = tuple(entry for entry in entries if entry is not None)
        if len(known) < len(entries):
            return None
        coefficients.append(coefficient_of_factor(AppliedFactor(op, known)))
    return _picked_state(ctx, op, PickedEntries(found[0].labels, tuple(coefficients)))


def _divide_rows(ctx: LossContext, op: GlueOp) -> ValueState | None:
    """The state of rows over picked entries; None for others."""
    if len(op.operands) != 2 or op.operands[1] not in ctx.picked or not ctx.carries_samples(op.operands[0]):
        return None
    above, picked = op.operands[0], ctx.picked[op.operands[1]]
    if not isinstance(ctx.state_of(above), LocalState) or "rounding_mode" in op.arguments.kwargs:
        return None
    type, parts = tensor_type(op.results[0]), list[SumPart]()
    for number, coefficient in enumerate(picked.coefficients):
        row_class = _RowsOfClass.mark_rows(ctx, op, picked.labels, number, type)
        rows = ctx.pending.make_glue(op, "aten.mul.Tensor", [above, row_class.mask], "$0, $1", type)
        parts.append(SumPart(row_class.known_weight(ctx, op, UNIT_COEFFICIENT / coefficient), rows))
    return SumState(tuple(parts))


def states_of_weighted_labels(ctx: LossContext, op: Computation) -> Sequence[ValueState] | None:
    """The states of `nll_loss` with weights of classes that depend on the batch; None if these are not known
    before any forward."""
    scores, labels, weights = op.operands
    coefficients = _entries_of(ctx, op, weights)
    if coefficients is None or not ctx.is_plain(scores) or not ctx.is_plain(labels):
        return None
    ignored, reduction = (
        get_argument(op, 4, "ignore_index", -100),
        get_argument(op, 3, "reduction", REDUCTION_MEAN),
    )
    type, kind = tensor_type(labels), tensor_type(scores)
    rows = TensorType.from_dims(type.shape, kind.dtype.data, kind.requires_grad)
    losses = ctx.pending.make_glue(
        op, "aten.nll_loss_nd.default", [scores, labels], f"$0, $1, None, {REDUCTION_NONE}, {ignored}", rows
    )
    parts, weights_of_classes = list[SumPart](), list[Coefficient]()
    for number, coefficient in enumerate(coefficients):
        if number == ignored:
            continue
        row_class = _RowsOfClass.mark_rows(ctx, op, labels, number, kind)
        weight = row_class.known_weight(ctx, op, coefficient)
        weights_of_classes.append(weight * row_class.count)
        weighted = ctx.pending.make_glue(op, "aten.mul.Tensor", [losses, row_class.mask], "$0, $1", rows)
        if reduction == REDUCTION_NONE:
            parts.append(SumPart(weight, weighted))
        else:
            parts.append(SumPart(weight, _make_sum(ctx, op, weighted), True, op))
    total = sum_coefficients(weights_of_classes)
    if reduction == REDUCTION_MEAN:
        parts = [part.scale_by(UNIT_COEFFICIENT / total) for part in parts]
    return [SumState(tuple(parts)), SumState((SumPart(total),))][: len(op.results)]


def _entries_of(ctx: LossContext, op: Computation, vector: SSAValue) -> tuple[Coefficient, ...] | None:
    """All entries of a short vector as coefficients; None if one of them is none."""
    entries = [coefficient_of_entry(ctx, op, vector, i) for i in range(count_few_entries(vector) or 0)]
    known = tuple(entry for entry in entries if entry is not None)
    return known if known and len(known) == len(entries) else None


def _picked_state(ctx: LossContext, op: Computation, picked: PickedEntries) -> ValueState:
    type, parts = tensor_type(op.results[0]), list[SumPart]()
    for number, coefficient in enumerate(picked.coefficients):
        row_class = _RowsOfClass.mark_rows(ctx, op, picked.labels, number, type)
        parts.append(SumPart(row_class.known_weight(ctx, op, coefficient), row_class.mask))
    ctx.picked[op.results[0]] = picked
    return SumState(tuple(parts))


@dataclass(frozen=True)
class _RowsOfClass:
    """The rows with one label: `mask` is 1 for these and 0 for others, `total` its sum, and `count` that over
    the batch."""

    mask: SSAValue
    total: SSAValue
    count: Coefficient

    @staticmethod
    def mark_rows(
        ctx: LossContext, op: Computation, labels: SSAValue, number: int, like: TensorType
    ) -> _RowsOfClass:
        """The rows with the label `number`, with a mask of the dtype of `like`."""
        shape, cast = tensor_type(labels).shape, f"$0, dtype=torch.{like.torch_dtype}"
        is_class = ctx.pending.make_glue(
            op, "aten.eq.Scalar", [labels], f"$0, {number}", TensorType.from_dims(shape, "bool")
        )
        mask_type = TensorType.from_dims(shape, like.dtype.data)
        mask = ctx.pending.make_glue(op, "aten._to_copy.default", [is_class], cast, mask_type)
        total = _make_sum(ctx, op, mask)
        return _RowsOfClass(mask, total, coefficient_of_factor(LeafFactor(total)))

    def known_weight(self, ctx: LossContext, op: Computation, coefficient: Coefficient) -> Coefficient:
        """The coefficient of the class; 0 if the batch has no such rows, where it may be infinite."""
        some = ctx.pending.make_glue(
            op, "aten.gt.Scalar", [self.total], "$0, 0", TensorType.from_dims([], "bool")
        )
        chosen = ctx.pending.make_glue(op, "aten.where.ScalarOther", [some, some], "$0, $1, 0", SCALAR_TYPE)
        assert isinstance(some.owner, GlueOp) and isinstance(chosen.owner, GlueOp)
        is_some = coefficient_of_factor(AppliedFactor(some.owner, (self.count,)))
        return coefficient_of_factor(AppliedFactor(chosen.owner, (is_some, coefficient)))


def _make_sum(ctx: LossContext, op: Computation, value: SSAValue) -> SSAValue:
    type = tensor_type(value)
    return ctx.pending.make_glue(
        op, "aten.sum.default", [value], "$0", TensorType.from_dims([], type.dtype.data, type.requires_grad)
    )
