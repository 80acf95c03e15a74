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
from secc.ir.dialect.ops import GraphOp, strings_attr
from secc.runtime.plan.schema import FusionRecord

FUSIONS_ATTRIBUTE = "fusions"  # of a graph
FUSED_ATTRIBUTE = (
    "fused"  # of a block that no case calls any more, because fused operators read its parameters
)
PASS_OF_RULE = {
    "linear-cross-entropy": "fuse-linear-loss",
    "linear-kl": "fuse-linear-loss",
    "linear-kl-ce": "fuse-linear-loss",
    "rms-norm": "fuse-blocks",
    "layer-norm": "fuse-blocks",
    "residual-norm": "fuse-blocks",
    "swiglu": "fuse-blocks",
    "geglu": "fuse-blocks",
    "rope": "fuse-blocks",
}  # each rule's pass; `docs/fusion.md` says what the rules match


def check_rule_names(rules: Iterable[str]) -> None:
    """Raises UserError for a name that is not a fusion rule."""
    for rule in rules:
        if rule not in PASS_OF_RULE:
            raise UserError(f"unknown fusion rule {rule!r}", remedy=f"rules are {', '.join(PASS_OF_RULE)}")


def rules_of_pass(rules: Iterable[str], name: str) -> tuple[str, ...]:
    """The rules in `rules` that belong to the pass `name`."""
    return tuple(rule for rule in rules if PASS_OF_RULE.get(rule) == name)


def record_fusions(graph: GraphOp, found: Iterable[FusionRecord]) -> None:
    """Adds what a pass matched, and what not and why, to the graph's record; cases have most entries in
    common, so each is kept once."""
    known = list(read_fusions(graph))
    known += [f for f in dict.fromkeys(found) if f not in known]
    if known:
        graph.attributes[FUSIONS_ATTRIBUTE] = strings_attr(
            "; ".join((f.rule, f.what, f.where, f.why)) for f in known
        )


def read_fusions(graph: GraphOp) -> tuple[FusionRecord, ...]:
    """The graph's record of fusions, () where there is none."""
    found = graph.attributes.get(FUSIONS_ATTRIBUTE)
    lines = [a.data for a in found if isinstance(a, StringAttr)] if isinstance(found, ArrayAttr) else []
    return tuple(FusionRecord(*line.split("; ", 3)) for line in lines)
