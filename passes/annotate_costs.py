"""`annotate-costs`: sums the costs of calls and glue into each section, as expressions over a micro-batch's
sizes.

`secc.cost.counting.annotate_calls`, which has the user's modules, writes the costs of calls; other calls are
estimated, and their section is labelled `default`. `allocate` computes the same sums again, since passes in
between may move ops to other sections.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.cost.model.patterns_and_transfers import section_transfers
from secc.cost.model.section_cost import SectionCost, section_cost
from secc.ir.dialect.ops import SectionOp, graph_of, strings_attr
from secc.ir.dialect.python_attributes import int_attr, int_list_attr
from secc.runtime.plan.schema import SubgroupCost


@dataclass(frozen=True)
class AnnotateCosts(ModulePass):
    name = "annotate-costs"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for section in graph.sections:
            write_section_cost(section, section_cost(graph, section))
        sent: dict[str, list[str]] = {}
        for c in section_transfers(graph):
            sent.setdefault(c.src, []).append(c.size)
        for section in graph.sections:
            section.attributes["sent_bytes"] = StringAttr(" + ".join(sent.get(section.sym.data, ["0"])))


def write_section_cost(section: SectionOp, cost: SectionCost) -> None:
    """Writes a section's cost into its attributes."""
    for key in ("flops", "backward_flops", "saved", "glue_bytes"):
        section.attributes[key] = StringAttr(getattr(cost, key))
    for key in ("streamed", "kept_between"):
        if getattr(cost, key) != "0":
            section.attributes[key] = StringAttr(getattr(cost, key))
    for key in ("ops", "params", "trainable", "param_bytes", "trainable_bytes"):
        section.attributes[key] = int_attr(getattr(cost, key))
    section.attributes["dtype"] = StringAttr(cost.dtype)
    section.attributes["cost"] = StringAttr(cost.label)


def write_subgroup_costs(section: SectionOp, subgroups: Iterable[SubgroupCost], most_bytes: int) -> None:
    """Writes what samples cost that some ranks of cp compute without the others, each in at most `most_bytes`
    bytes, into a section's attributes."""
    found = list(subgroups)
    section.attributes |= {
        "subgroup_ranks": int_list_attr(s.ranks for s in found),
        "subgroup_forward_ns": strings_attr(s.cost.forward_ns for s in found),
        "subgroup_backward_ns": strings_attr(s.cost.backward_ns for s in found),
        "subgroup_saved": strings_attr(s.cost.saved for s in found),
        "subgroup_bytes": int_attr(most_bytes),
    }
    if any(s.cost.kept_between for s in found):
        section.attributes["subgroup_kept_between"] = strings_attr(s.cost.kept_between for s in found)
