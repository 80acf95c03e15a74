"""`dce`: removes pure ops without uses, and calls of blocks that reach neither the loss nor a guard.

A block's call may be removed because blocks are functions of their arguments for the purposes of training: a
call with effects (a buffer updated in forward) is refused before any pass runs. So the ops that count as pure
here are more than xDSL's trait `Pure` says, which its own dead code elimination goes by: a leaf and a call
may be removed, but not be merged or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.ir.dialect.ops import CallOp, ConstOp, GlueOp, InputOp, LeafOp, ParamOp, SizeOp, graph_of

_REMOVABLE = (CallOp, GlueOp, InputOp, ParamOp, ConstOp, SizeOp, LeafOp)


@dataclass(frozen=True)
class DeadCodeElimination(ModulePass):
    name = "dce"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for case in graph_of(op).cases:
            for inner in reversed(case.ops):
                if isinstance(inner, _REMOVABLE) and not any(r.uses for r in inner.results):
                    inner.detach()
                    inner.erase()
