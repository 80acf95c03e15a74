"""Makes one section of several, where a boundary between them is not possible."""

from __future__ import annotations

from secc.ir.analysis.dataflow import get_strings, producer_of
from secc.ir.dialect import digraph
from secc.ir.dialect.ops import GraphOp, SectionOp, section_of, set_section, strings_attr, strings_of
from secc.passes.sections.assign_ops import update_section_mode


def merge_sections(graph: GraphOp, a: str, b: str) -> SectionOp:
    """Merges two sections, and those between them, into the one with the most parameters; returns it."""
    flows = section_flows(graph)
    sections = {s.sym.data: s for s in graph.sections}
    # What lies on a path between the two would depend on the merged section and feed it: a cycle.
    members = [
        s
        for name, s in sections.items()
        if name in digraph.nodes_between(flows, a, b) | digraph.nodes_between(flows, b, a)
    ]
    keep = max(members, key=lambda s: _parameter_count(graph, s))
    keep.blocks = strings_attr(dict.fromkeys(block for s in members for block in strings_of(s.blocks)))
    keep.when = strings_attr(
        sorted({key for s in members for key in strings_of(s.when)})
        if all(strings_of(s.when) for s in members)
        else []
    )
    add_section_notes(keep, *(n for s in members if s is not keep for n in get_strings(s, "notes")))
    names = {s.sym.data for s in members}
    for case in graph.cases:
        for op in case.ops:
            if section_of(op) in names:
                set_section(op, keep.sym.data)
    for section in members:
        if section is not keep:
            section.detach()
            section.erase()
    update_section_mode(graph, keep)
    _sort_sections(graph)
    return keep


def section_flows(graph: GraphOp) -> set[tuple[str, str]]:
    """Pairs (producer, consumer) of sections between which values cross, over all cases."""
    pairs: set[tuple[str, str]] = set()
    for case in graph.cases:
        for op in case.ops:
            here = section_of(op)
            pairs |= {
                (there, here)
                for o in op.operands
                if here and (there := section_of(producer_of(o))) and there != here
            }
    return pairs


def add_section_notes(section: SectionOp, *notes: str) -> None:
    """Adds notes for the report to a section's attribute `notes`."""
    if notes:
        section.attributes["notes"] = strings_attr([*get_strings(section, "notes"), *notes])


def _parameter_count(graph: GraphOp, section: SectionOp) -> int:
    return sum(graph.blocks[path].params.data for path in strings_of(section.blocks))


def _sort_sections(graph: GraphOp) -> None:
    """Put the section declarations in an order in which producers come first, otherwise as they were."""
    sections = {s.sym.data: s for s in graph.sections}
    place = {name: i for i, name in enumerate(sections)}
    block, first = graph.body.block, graph.cases[0]
    for name in digraph.topological_order(sections, section_flows(graph), key=lambda n: place[n]):
        block.insert_op_before(block.detach_op(sections[name]), first)
