"""Counts the layers of a section, between which pipeline stages are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from secc.cost.model.section_cost import ops_in_section
from secc.ir.analysis.dataflow import get_number
from secc.ir.analysis.layers import counts_as_layer, layers_of_blocks
from secc.ir.dialect.ops import CallOp, GraphOp, SectionOp, strings_of


def count_stackable_layers(graph: GraphOp, section: SectionOp, measured: int) -> int:
    """Number of layers between which stages of a section can be cut.

    Counted from the layers that the calls of the section run, in the case with most of them; other calls go
    along with their neighbours. Where a section calls no layers, it is the larger of `measured` and the
    declared number.
    """
    most_layers = Counter[str]()  # runs of layers by block, in the case with most of them
    for calls in _calls_by_case(graph, section):
        layer_runs = Counter[str]()
        for path, runs in _find_layer_calls(graph, calls):
            layer_runs[path] += runs
        most_layers |= layer_runs
    return most_layers.total() or max(measured, count_declared_layers(graph, section))


def runs_layers_again(graph: GraphOp, section: SectionOp) -> bool:
    """Whether a forward runs some layers of a section more than once, such as those of a policy that scores
    two answers in turn. Stages are cut along the calls, so a layer would be on as many stages as it has
    calls."""
    return any(
        times > 1
        for calls in _calls_by_case(graph, section)
        for times in Counter(path for path, _ in _find_layer_calls(graph, calls)).values()
    )


def _calls_by_case(graph: GraphOp, section: SectionOp) -> Iterator[list[CallOp]]:
    """Yields the calls of a section's blocks, for each case."""
    for case in graph.cases:
        yield [op for op in ops_in_section(case, section.sym.data) if isinstance(op, CallOp)]


def _find_layer_calls(graph: GraphOp, calls: Sequence[CallOp]) -> list[tuple[str, int]]:
    """The calls that run layers, as (block path, number of layers): of stacks, and of numbered blocks that
    have numbered siblings, or the largest parts of such layers."""
    called = {op.target.data: graph.blocks[op.target.data] for op in calls}
    layers = layers_of_blocks(called.values())
    open_stacks, found = {called[path].component for path in layers}, list[tuple[str, int]]()
    for op in calls:
        path, block, runs = op.target.data, called[op.target.data], int(get_number(op, "layers") or 1)
        if not counts_as_layer(block):
            continue
        if "flops" not in op.attributes and block.component not in open_stacks and block.layers is not None:
            runs = block.layers.data  # not measured: it may hold its component's whole stack
        if runs > 1 or path in layers:
            found.append((path, runs))
    return found


def count_declared_layers(graph: GraphOp, section: SectionOp) -> int:
    """Sum of the declared layers of the stacks that the section's blocks belong to, measured or not."""
    declared = graph.blocks
    blocks = [declared[path] for path in strings_of(section.blocks)]
    return sum({b.component: b.layers.data for b in blocks if b.layers is not None}.values())
