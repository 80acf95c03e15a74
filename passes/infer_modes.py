"""`infer-modes`: which backward every call needs: `train` where parameters take a gradient, `dgrad` where
gradients only pass through, else `forward`.

A gradient must both leave a call (grad mode on, and trainable parameters or an operand that requires a
gradient) and arrive there: a call with results that reach the loss only through `detach`, comparisons or
indices needs no backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from secc.ir.analysis.dataflow import find_gradient_values
from secc.ir.dialect.ops import CallOp, Computation, GlueOp, GraphOp, ParamOp, graph_of
from secc.ir.dialect.tensor_type import tensor_type


@dataclass(frozen=True)
class InferModes(ModulePass):
    name = "infer-modes"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for case in graph.cases:
            wanted = find_gradient_values(case)
            for inner in case.ops:
                reads = any(isinstance(o.owner, ParamOp) for o in inner.operands)
                if isinstance(inner, CallOp) or (isinstance(inner, GlueOp) and reads):
                    inner.attributes["mode"] = StringAttr(infer_mode(graph, inner, wanted))


def infer_mode(graph: GraphOp, op: Computation, wanted: set[SSAValue]) -> str:
    """The mode of a call, or of glue that reads parameters; `wanted` are the values that a gradient of the
    loss reaches."""
    if "no_grad" in op.properties or not any(r in wanted for r in op.results):
        return "forward"
    trainable = any(isinstance(o.owner, ParamOp) and tensor_type(o).requires_grad for o in op.operands)
    if isinstance(op, CallOp):
        trainable = trainable or graph.blocks[op.target.data].trainable.data > 0
    if trainable:
        return "train"
    return "dgrad" if any(tensor_type(o).requires_grad for o in op.operands) else "forward"
