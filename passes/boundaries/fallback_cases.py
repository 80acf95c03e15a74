"""Spare cases: for micro-batches of which Python reads what no capture saw. They must not change how a plan
is cut.

The sections of one micro-batch may take different cases, so that a spare case has to exchange the same values
between sections as the others do. One that does not is dropped, and such micro-batches are then refused.
"""

from __future__ import annotations

from secc.ir.analysis.recorded_glue import SPARE
from secc.ir.dialect.ops import CaseOp, GraphOp
from secc.passes.boundaries.section_edges import edges_of
from secc.passes.sections.merge_sections import note


def spare_cases(graph: GraphOp) -> list[CaseOp]:
    """The spare cases of a graph."""
    return [c for c in graph.cases if SPARE in c.attributes]


def drop(graph: GraphOp, cases: list[CaseOp]) -> None:
    """Drop spare cases, with a note for people."""
    for case in cases:
        if case.parent is not None:
            case.detach()
        case.erase()
    if cases:
        note(
            graph.sections[-1],
            "a micro-batch of which Python reads what no capture saw is refused: its glue cannot be recorded anew",
        )


def drop_misfits(graph: GraphOp) -> None:
    """Drop the spare cases that exchange other values than the rest, or values that no edge can carry."""
    spare = spare_cases(graph)
    if not spare or not edges_of(graph)[1]:
        return
    for case in spare:
        case.detach()
    known, misfits = len(edges_of(graph)[1]), list[CaseOp]()
    for case in spare:
        graph.body.block.add_op(case)
        if len(edges_of(graph)[1]) > known:
            case.detach()
            misfits.append(case)
    drop(graph, misfits)
