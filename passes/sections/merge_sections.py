"""Makes one section of several, where a boundary between them is not possible."""

from __future__ import annotations

from secc.ir.analysis.dataflow import producer, texts_of
from secc.ir.dialect import digraph
from secc.ir.dialect.ops import GraphOp, SectionOp, section_of, set_section, strings, texts
from secc.passes.sections.assign_ops import settle_mode


def merge_sections(graph: GraphOp, a: str, b: str) -> SectionOp:
    """Merge two sections, and those between them, into the one with the most parameters; returns it."""
    flows = section_flows(graph)
    sections = {s.sym.data: s for s in graph.sections}
    members = [
        s
        for name, s in sections.items()
        if name in digraph.between(flows, a, b) | digraph.between(flows, b, a)
    ]
    keep = max(members, key=lambda s: _parameters(graph, s))
    keep.blocks = texts(dict.fromkeys(block for s in members for block in strings(s.blocks)))
    keep.when = texts(
        sorted({key for s in members for key in strings(s.when)})
        if all(strings(s.when) for s in members)
        else []
    )
    note(keep, *(n for s in members if s is not keep for n in texts_of(s, "notes")))
    names = {s.sym.data for s in members}
    for case in graph.cases:
        for op in case.ops:
            if section_of(op) in names:
                set_section(op, keep.sym.data)
    for section in members:
        if section is not keep:
            section.detach()
            section.erase()
    settle_mode(graph, keep)
    _reorder(graph)
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
                if here and (there := section_of(producer(o))) and there != here
            }
    return pairs


def note(section: SectionOp, *notes: str) -> None:
    """Keep what was done to a section for the report, in its attribute `notes`."""
    if notes:
        section.attributes["notes"] = texts([*texts_of(section, "notes"), *notes])


def _parameters(graph: GraphOp, section: SectionOp) -> int:
    return sum(graph.blocks[path].params.data for path in strings(section.blocks))


def _reorder(graph: GraphOp) -> None:
    """Put the section declarations in an order in which producers come first, otherwise as they were."""
    sections = {s.sym.data: s for s in graph.sections}
    place = {name: i for i, name in enumerate(sections)}
    block, first = graph.body.block, graph.cases[0]
    for name in digraph.order(sections, section_flows(graph), key=lambda n: place[n]):
        block.insert_op_before(block.detach_op(sections[name]), first)
