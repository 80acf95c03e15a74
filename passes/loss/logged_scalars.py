"""Scalars that forward returns in addition to the loss, for the run's log: terms without a gradient, with ids
that name them. Tensors that `metrics()` asks for are returned in the same way, and become outputs.

A scalar that is separable by sample is summed and divided as the loss's terms are, so the log has its value
for the whole global batch. Any other is logged as the mean of the micro-batches' values, weighted by their
samples, and the plan says so.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import GlueOp, ReturnOp, strings_of
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.coefficient import UNIT_COEFFICIENT
from secc.passes.loss.loss_context import LossContext
from secc.passes.loss.loss_walk import walk_logged
from secc.passes.loss.value_states import BadState, StackState, SumPart

LOGGED_PREFIX = "log:"  # of a term's id; the name follows, and a colon


def find_outputs(context: LossContext) -> dict[str, SSAValue]:
    """The tensors that `metrics()` asks for, by name and without a gradient."""
    return {
        name: _detach(context, value) for name, value in _returned_values(context) if tensor_type(value).dims
    }


def _returned_values(context: LossContext) -> list[tuple[str, SSAValue]]:
    end = context.case.ops[-1]
    assert isinstance(end, ReturnOp)
    return list(zip(strings_of(end.logs), end.operands[1:], strict=True))


def find_logged(context: LossContext) -> tuple[dict[str, list[SumPart]], list[str]]:
    """The parts of each logged scalar of a case by name, and a note for each that is not separable."""
    found: dict[str, list[SumPart]] = {}
    notes: list[str] = []
    for name, value in _returned_values(context):
        if tensor_type(value).dims:
            continue
        state = walk_logged(context, value)
        parts = (
            None
            if isinstance(state, BadState | StackState) or context.carries_samples(value)
            else context.parts_of(value)
        )
        if parts is None:
            why = state.reason if isinstance(state, BadState) else "it is no sum over samples"
            notes.append(
                f"{name} is logged as the mean of the micro-batches' own values, weighted by samples: {why}"
            )
        found[name] = [
            p if p.atom is None else p.with_atom(_detach_float(context, p.atom))
            for p in parts or (SumPart(UNIT_COEFFICIENT, value),)
        ]
    return found, notes


def _detach_float(context: LossContext, value: SSAValue) -> SSAValue:
    """A value as a real number without a gradient."""
    type, value = tensor_type(value), _detach(context, value)
    if not type.is_floating:
        plain = TensorType.from_dims(type.shape, "f32")
        value = context.pending.add_op(
            GlueOp.create_call("aten._to_copy.default", [value], "$0, dtype=torch.float32", [plain])
        ).results[0]
    return value


def _detach(context: LossContext, value: SSAValue) -> SSAValue:
    """A value without a gradient."""
    type = tensor_type(value)
    if not type.requires_grad:
        return value
    plain = TensorType.from_dims(type.shape, type.dtype.data)
    return context.pending.add_op(GlueOp.create_call("aten.detach.default", [value], "$0", [plain])).results[
        0
    ]
