"""Costs of calls in two forms: as the user wrote the modules, and with what `fuse-blocks` may rewrite in
them.

`secc.cost.counting.annotate_calls` notes the second under the keys below; a call takes it if all that was
rewritten in its block is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from xdsl.dialects.builtin import StringAttr

from secc.ir.dialect.ops import CallOp, GraphOp

FUSED_PREFIX = "fused_"


def choose_call_costs(graph: GraphOp, kept: Collection[str], dropped: Collection[str]) -> None:
    """Let calls cost what their modules do, which are rewritten if their paths are `kept`. A call with some
    of both keeps its own cost, which is the higher one."""
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                block = op.target.data
                rewritten = any(is_in_block(p, block) for p in kept) and not any(
                    is_in_block(p, block) for p in dropped
                )
                _choose_call_cost(op, rewritten)


def is_in_block(path: str, block: str) -> bool:
    """Whether a module is a block or in it."""
    return path == block or path.startswith(f"{block}.")


def blocks_broken_by_fusion(graph: GraphOp) -> set[str]:
    """The blocks that run on the meta device as the user wrote them, and not as rewritten."""
    calls = [op for case in graph.cases for op in case.ops if isinstance(op, CallOp)]
    return {
        c.target.data
        for c in calls
        if _cost_label(c, FUSED_PREFIX) == "default" and _cost_label(c, "") not in ("", "default")
    }


def _cost_label(call: CallOp, prefix: str) -> str:
    found = call.attributes.get(f"{prefix}cost")
    return found.data if isinstance(found, StringAttr) else ""


def _choose_call_cost(call: CallOp, rewritten: bool) -> None:
    for key in [k for k in call.attributes if k.startswith(FUSED_PREFIX)]:
        value = call.attributes.pop(key)
        if rewritten:
            call.attributes.pop("forward_ns", None)  # the user's own modules were timed
            call.attributes.pop("backward_ns", None)
            call.attributes[key.removeprefix(FUSED_PREFIX)] = value
