"""`fuse-linear-loss`: losses on a linear head's logits become one operator that never holds the logits."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.ir import fusion


@dataclass(frozen=True)
class FuseLinearLoss(ModulePass):
    """`without`: rules that are off."""

    name = "fuse-linear-loss"
    without: tuple[str, ...] = ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        fusion.check(self.without)
