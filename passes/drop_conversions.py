"""`drop-conversions`: removes conversions of glue to the dtype and device that a tensor has.

All values of a case are on the rank's device, so a type says all that a conversion may change but memory
format, layout and pinning. PyTorch records one without effect only for `copy=True`. Glue never writes into a
tensor, so such a copy matters only where a block is given the copy or what it was made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.ir.analysis.shared_memory import reaches_block
from secc.ir.dialect.argument_template import DottedName
from secc.ir.dialect.ops import GlueOp, graph_of
from secc.ir.dialect.tensor_type import tensor_type

_CONVERSIONS = ("_to_copy", "to")
_KEEPING_NAMES = {"device", "torch.strided", "torch.preserve_format"}


@dataclass(frozen=True)
class DropConversions(ModulePass):
    name = "drop-conversions"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for case in graph_of(op).cases:
            for inner in case.ops:
                if isinstance(inner, GlueOp) and _changes_nothing(inner):
                    inner.results[0].replace_all_uses_with(inner.operands[0])
                    inner.detach()
                    inner.erase()


def _changes_nothing(op: GlueOp) -> bool:
    """Whether a conversion gives its operand's dims, dtype and gradient, in the operand's memory format, and
    no block sees that it is a copy."""
    if op.base_name not in _CONVERSIONS or op.operands[0].type != op.results[0].type:
        return False
    if reaches_block(op.operands[0]) or reaches_block(op.results[0]):
        return False
    arguments = op.arguments
    names = {leaf.text for leaf in arguments.leaves() if isinstance(leaf, DottedName)}
    dtype = f"torch.{tensor_type(op.results[0]).torch_dtype}"
    return names <= _KEEPING_NAMES | {dtype} and not arguments.kwargs.get("pin_memory")
