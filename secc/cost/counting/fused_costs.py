"""Chooses between two costs of a call: with the user's modules, and with modules that `fuse-blocks` rewrites.

`secc.cost.counting.annotate_calls` writes the second one under attributes with FUSED_PREFIX. A call takes it
if all rewritten modules in its block are kept.
"""

from __future__ import annotations

from collections.abc import Collection

from xdsl.dialects.builtin import StringAttr

from secc.ir.dialect.ops import CallOp, GraphOp

FUSED_PREFIX = "fused_"


def choose_call_costs(graph: GraphOp, kept: Collection[str], dropped: Collection[str]) -> None:
    """Let every call cost what its modules do after fusion.

    kept, dropped: paths of modules that are rewritten or remain as they are. A call with both keeps the cost
    of the original modules, which is the higher one.
    """
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                block = op.target.data
                rewritten = any(is_in_block(p, block) for p in kept) and not any(
                    is_in_block(p, block) for p in dropped
                )
                _choose_call_cost(op, rewritten)


def is_in_block(path: str, block: str) -> bool:
    """Whether a module is a block or inside it."""
    return path == block or path.startswith(f"{block}.")


def blocks_broken_by_fusion(graph: GraphOp) -> set[str]:
    """The blocks that run on the meta device with the user's modules but not with rewritten ones."""
    calls = [op for case in graph.cases for op in case.ops if isinstance(op, CallOp)]
    return {
        c.target.data
        for c in calls
        if _cost_label(c, FUSED_PREFIX) == "default" and _cost_label(c, "") not in ("", "default")
    }


def _cost_label(call: CallOp, prefix: str) -> str:
    label = call.attributes.get(f"{prefix}cost")
    return label.data if isinstance(label, StringAttr) else ""


def _choose_call_cost(call: CallOp, rewritten: bool) -> None:
    for key in [k for k in call.attributes if k.startswith(FUSED_PREFIX)]:
        value = call.attributes.pop(key)
        if rewritten:
            call.attributes.pop("forward_ns", None)  # those were measured on the user's modules
            call.attributes.pop("backward_ns", None)
            call.attributes[key.removeprefix(FUSED_PREFIX)] = value
