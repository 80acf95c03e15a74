"""Which values a block may write into, or reads by their strides: a copy of such a value is more than its
entries.

Capture makes glue functional, but a block is called as it is. It may work in place on its argument
(`nn.ReLU(inplace=True)`), which a copy keeps from the tensor it was made of, or `view` it, which needs the
strides that a copy gives.
"""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.dataflow import producer_of
from secc.ir.dialect.ops import CallOp, GlueOp, TransferOp

# fmt: off
VIEW_OPS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze",
    "expand", "expand_as", "view_as", "alias", "detach", "lift_fresh", "positive", "contiguous", "transpose",
    "t", "numpy_T", "mT", "permute", "movedim", "swapaxes", "slice", "select", "narrow", "diagonal", "unfold",
    "split", "split_with_sizes", "chunk", "tensor_split", "unbind", "view_as_real", "real", "imag",
})  # the result may share memory with operand 0
# fmt: on
_STRIDE_OPS = frozenset({"as_strided", "view_as_complex"})


def reaches_block(value: SSAValue) -> bool:
    """Whether a block, a function of the user's or an op that goes by strides is given `value` or a tensor
    that may share memory with it."""
    sharing, waiting = {value}, [value]
    while waiting:
        shared = waiting.pop()
        found: list[SSAValue] = []
        if _makes_view(producer := producer_of(shared)):
            found.append(producer.operands[0])
        for use in shared.uses:
            if _sees_memory(use.operation):
                return True
            if use.index == 0 and _makes_view(use.operation):
                found.extend(use.operation.results)
        waiting += [v for v in found if v not in sharing]
        sharing.update(found)
    return False


def _makes_view(op: Operation) -> bool:
    return isinstance(op, TransferOp) or (isinstance(op, GlueOp) and op.base_name in VIEW_OPS)


def _sees_memory(op: Operation) -> bool:
    if isinstance(op, GlueOp):
        return (
            not op.callee.startswith("aten.") or op.base_name in _STRIDE_OPS or op.callee == "aten.view.dtype"
        )
    return isinstance(op, CallOp)
