"""Counts the layers of a section, between which pipeline stages are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from secc.cost.model.section_cost import ops_in_section
from secc.ir.analysis.dataflow import get_number
from secc.ir.dialect.ops import CallOp, GraphOp, SectionOp, strings_of


def count_stackable_layers(graph: GraphOp, section: SectionOp, measured: int) -> int:
    """Number of layers between which stages of a section can be cut.

    Counted from the layers that the calls of the section run, in the case with most of them; other calls go
    along with their neighbours. Where a section calls no layers, it is the larger of `measured` and the
    declared number.
    """
    most_layers = Counter[str]()  # runs of layers by block, in the case with most of them
    for case in graph.cases:
        most_layers |= _count_called_layers(
            graph, [op for op in ops_in_section(case, section.sym.data) if isinstance(op, CallOp)]
        )
    return most_layers.total() or max(measured, count_declared_layers(graph, section))


def _count_called_layers(graph: GraphOp, calls: Sequence[CallOp]) -> Counter[str]:
    """Number of layers that some calls run, by block path: layers of stacks, and numbered blocks that have
    numbered siblings."""
    paths = {op.target.data for op in calls}
    numbered_siblings = Counter(
        path.rpartition(".")[0] for path in paths if path.rpartition(".")[2].isdecimal()
    )
    layers = {
        path
        for path in paths
        if path.rpartition(".")[2].isdecimal() and numbered_siblings[path.rpartition(".")[0]] > 1
    }
    open_stacks, layer_runs = {graph.blocks[path].component for path in layers}, Counter[str]()
    for op in calls:
        path, block, runs = op.target.data, graph.blocks[op.target.data], int(get_number(op, "layers") or 1)
        if "flops" not in op.attributes and block.component not in open_stacks and block.layers is not None:
            runs = block.layers.data  # not measured: it may hold its component's whole stack
        if runs > 1 or path in layers:
            layer_runs[path] += runs
    return layer_runs


def count_declared_layers(graph: GraphOp, section: SectionOp) -> int:
    """Sum of the declared layers of the stacks that the section's blocks belong to, measured or not."""
    declared = graph.blocks
    blocks = [declared[path] for path in strings_of(section.blocks)]
    return sum({b.component: b.layers.data for b in blocks if b.layers is not None}.values())
