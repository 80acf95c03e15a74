"""Buffers that coefficients depend on, such as weights of classes: their values at compile time become
constants of the plan.

Coefficients are computed where no model is. A run compares its model's buffers with the plan's before it
starts (`secc.runtime.training.rank_context`).
"""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.dataflow import is_random_op
from secc.ir.dialect.ops import ConstOp, ParamOp
from secc.ir.dialect.readable_names import BUFFER_CONSTANT_PREFIX, KNOWN_BUFFER_ATTRIBUTE
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.loss.pending_ops import PendingOps


def is_known_buffer(op: Operation) -> bool:
    """Whether an op reads a buffer that a plan may take as a constant."""
    return isinstance(op, ParamOp) and KNOWN_BUFFER_ATTRIBUTE in op.attributes


def copy_for_leaf(shop: PendingOps, value: SSAValue) -> SSAValue:
    """A value that is known before any block runs, computed again with constants in place of buffers and
    with random ops of its own, since a section has those of the case; the value itself without either."""
    copies: dict[SSAValue, SSAValue] = {}

    def copy_value(value: SSAValue) -> SSAValue:
        if value not in copies:
            copies[value] = value
            owner = value.owner
            assert isinstance(owner, Operation)
            if isinstance(owner, ParamOp):
                copies[value] = shop.add_op(
                    ConstOp.create_source(BUFFER_CONSTANT_PREFIX + owner.path.data, tensor_type(value))
                ).results[0]
            elif is_random_op(owner) or any(copy_value(o) is not o for o in owner.operands):
                new = owner.clone(value_mapper={o: copy_value(o) for o in owner.operands})
                copies.update(zip(owner.results, shop.add_op(new).results, strict=True))
        return copies[value]

    return copy_value(value)
