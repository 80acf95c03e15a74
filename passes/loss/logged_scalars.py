"""Scalars that forward returns beside the loss, which a run logs: terms without a gradient, under ids that
name them.

A scalar that separates by sample as a loss does is summed and divided as its terms are, so that what is
logged is that of the whole global batch. Any other is the mean of what the micro-batches have, weighted by
their samples, and the plan says so.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import GlueOp, ReturnOp, strings
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.loss.coefficient import ONE
from secc.passes.loss.loss_context import NOT_SEPARABLE, Context, floating
from secc.passes.loss.loss_walk import walk_logged
from secc.passes.loss.value_states import Bad, Part, Stack

PREFIX = "log:"  # of a term's id; the name follows, and a colon


def logged(context: Context) -> tuple[dict[str, list[Part]], list[str]]:
    """The parts of each scalar of a case by name, and a note for each that does not separate."""
    end = context.case.ops[-1]
    assert isinstance(end, ReturnOp)
    found: dict[str, list[Part]] = {}
    notes: list[str] = []
    for name, value in zip(strings(end.logs), end.operands[1:], strict=True):
        state = walk_logged(context, value)
        parts = None if isinstance(state, Bad | Stack) or context.carries(value) else context.parts(value)
        if parts is None:
            why = (
                state.message.removeprefix(NOT_SEPARABLE)
                if isinstance(state, Bad)
                else "it is no sum over samples"
            )
            notes.append(
                f"{name} is logged as the mean of the micro-batches' own values, weighted by samples: {why}"
            )
        found[name] = [
            p if p.atom is None else p.moved(_bare(context, p.atom)) for p in parts or (Part(ONE, value),)
        ]
    return found, notes


def _bare(context: Context, value: SSAValue) -> SSAValue:
    """A value as a real number without a gradient."""
    type = tensor(value)
    if type.requires_grad:
        plain = TensorType.of(type.shape, type.dtype.data)
        value = context.shop.add(GlueOp.of("aten.detach.default", [value], "$0", [plain])).results[0]
    if not floating(type):
        plain = TensorType.of(type.shape, "f32")
        value = context.shop.add(
            GlueOp.of("aten._to_copy.default", [value], "$0, dtype=torch.float32", [plain])
        ).results[0]
    return value
