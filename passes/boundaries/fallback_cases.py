"""Fallback cases, for micro-batches that take a branch that no capture took. They must not change where
sections are cut.

The sections of one micro-batch may take different cases, so a fallback case has to exchange the same values
between sections as the captured cases. One that does not is dropped, and such micro-batches are then refused.
"""

from __future__ import annotations

from secc.ir.analysis.recorded_glue import FALLBACK_ATTRIBUTE
from secc.ir.dialect.ops import CaseOp, GraphOp
from secc.passes.boundaries.section_edges import build_edges
from secc.passes.sections.merge_sections import add_section_notes


def find_fallback_cases(graph: GraphOp) -> list[CaseOp]:
    """The fallback cases of a graph."""
    return [c for c in graph.cases if FALLBACK_ATTRIBUTE in c.attributes]


def drop_fallbacks(graph: GraphOp, cases: list[CaseOp]) -> None:
    """Removes fallback cases, with a note for the report."""
    for case in cases:
        if case.parent is not None:
            case.detach()
        case.erase()
    if cases:
        add_section_notes(
            graph.sections[-1],
            "micro-batches that take a branch not seen during capture will be rejected: the code between "
            "modules cannot be re-recorded for them",
        )


def drop_incompatible_fallbacks(graph: GraphOp) -> None:
    """Removes the fallback cases that exchange other values than captured cases, or values that no edge can
    carry."""
    spare = find_fallback_cases(graph)
    if not spare or not build_edges(graph)[1]:
        return
    for case in spare:
        case.detach()
    known, misfits = len(build_edges(graph)[1]), list[CaseOp]()
    for case in spare:
        graph.body.block.add_op(case)
        if len(build_edges(graph)[1]) > known:
            case.detach()
            misfits.append(case)
    drop_fallbacks(graph, misfits)
