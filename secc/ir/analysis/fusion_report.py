"""What the fusing passes share: the names of their rules, the switches that turn rules off, and a record of
what matched and what did not.

The record is the graph's attribute `fusions`, a list of texts `rule; what; where; why`, such as
`linear-cross-entropy; lm_head; loss_utils.py:42; `; the last part is empty where the rule matched. Codegen
puts it into plan.json, from where `secc explain` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ArrayAttr, StringAttr

from secc.errors import UserError
from secc.ir.dialect.ops import GraphOp, texts
from secc.runtime.plan.schema import Fusion

ATTRIBUTE = "fusions"  # of a graph
FUSED = "fused"  # of a block that no case calls any more, because fused operators read its parameters
RULES = {
    "linear-cross-entropy": "fuse-linear-loss",
    "linear-kl": "fuse-linear-loss",
    "linear-kl-ce": "fuse-linear-loss",
    "rms-norm": "fuse-blocks",
    "layer-norm": "fuse-blocks",
    "swiglu": "fuse-blocks",
    "geglu": "fuse-blocks",
    "rope": "fuse-blocks",
}  # each rule's pass; `docs/fusion.md` says what the rules match


def check(rules: Iterable[str]) -> None:
    """Raise UserError for a name that is no rule's."""
    for rule in rules:
        if rule not in RULES:
            raise UserError(f"there is no fusion rule {rule!r}", remedy=f"rules are {', '.join(RULES)}")


def of_pass(rules: Iterable[str], name: str) -> tuple[str, ...]:
    """Those of the rules that belong to a pass."""
    return tuple(rule for rule in rules if RULES.get(rule) == name)


def note(graph: GraphOp, found: Iterable[Fusion]) -> None:
    """Add to the record what a pass found, each once: cases have most of it in common."""
    known = list(fusions(graph))
    known += [f for f in dict.fromkeys(found) if f not in known]
    if known:
        graph.attributes[ATTRIBUTE] = texts("; ".join((f.rule, f.what, f.where, f.why)) for f in known)


def fusions(graph: GraphOp) -> tuple[Fusion, ...]:
    """The record, () for none."""
    found = graph.attributes.get(ATTRIBUTE)
    lines = [a.data for a in found if isinstance(a, StringAttr)] if isinstance(found, ArrayAttr) else []
    return tuple(Fusion(*line.split("; ", 3)) for line in lines)
