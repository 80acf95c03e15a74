"""`sink-boundaries`: moves the boundaries of sections to where the fewest bytes cross.

A teacher's head goes into the student's section, so that hidden states travel in place of logits; slicing and pooling glue goes to the
producer, expanding glue to the consumer; of two tensors computed from one another one is sent. Each pair of sections is a minimum cut
(`secc.ir.boundary`). Where no boundary can be carried by edges, the two sections become one. What was done is kept in the sections'
attribute `notes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, OpResult
from xdsl.passes import ModulePass

from secc.ir.analysis import Statistics, nbytes, with_gradient
from secc.ir.boundary import Boundary, Prices
from secc.ir.dialect import CallOp, CaseOp, GraphOp, SectionOp, graph_of, section_of, set_section, strings, texts
from secc.ir.edges import edges_of, label
from secc.ir.merging import merge_sections, note
from secc.ir.placement import repeat, settle_mode
from secc.ir.spare import drop, drop_misfits, spare_cases


@dataclass(frozen=True)
class SinkBoundaries(ModulePass):
    """`flops_per_byte`: the FLOPs that cost as much time as sending a byte. `growth`: of its parameters, by which a section may grow."""

    name = "sink-boundaries"
    flops_per_byte: int = Prices.flops_per_byte
    growth: float = Prices.growth

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        while self._improve(graph):
            pass
        drop_misfits(graph)
        while problem := next(iter(edges_of(graph)[1]), None):
            crossing, reason = problem
            _merge(graph, crossing.src, crossing.dst, f"{label(crossing)} at {crossing.where} cannot cross: {reason}")

    def _improve(self, graph: GraphOp) -> bool:
        """Cut every pair of sections that exchanges values; True if two had to be merged, so that all pairs are cut again."""
        names = [s.sym.data for s in graph.sections]
        for j, dst in enumerate(names):
            for src in names[:j]:
                if not settle(graph, src, dst, Prices(self.flops_per_byte, self.growth)):
                    if spare := spare_cases(graph):
                        drop(graph, spare)
                        return True
                    _merge(graph, src, dst, "no boundary between them can be carried by rows per sample")
                    return True
        return False


def settle(graph: GraphOp, src: str, dst: str, prices: Prices) -> bool:
    """Move the boundary between two sections to where the fewest bytes cross; False if there is no possible boundary."""
    if not any(True for _ in _crossings(graph, src, dst)):
        return True
    chosen = Boundary(graph, src, dst, prices).computed_by_dst()
    if chosen is not None:
        _Move(graph, src, dst, chosen).run()
    return chosen is not None


class _Move:
    """Moves the ops of a pair of sections to the side that the cut chose."""

    def __init__(self, graph: GraphOp, src: str, dst: str, computed_by_dst: set[Operation]) -> None:
        self.graph, self.src, self.dst, self.chosen = graph, src, dst, computed_by_dst
        self.sections = {s.sym.data: s for s in graph.sections}

    def run(self) -> None:
        before = _sent(self.graph, self.src, self.dst)
        ops = [op for case in self.graph.cases for op in case.ops]
        up = [op for op in ops if section_of(op) == self.dst and op not in self.chosen]
        down = [op for op in reversed(ops) if section_of(op) == self.src and op in self.chosen]
        for op in up:
            set_section(op, self.src)
        moved = [*up, *(op for op in down if self._take(op))]
        if not moved:
            return
        blocks = list(dict.fromkeys(op.target.data for op in moved if isinstance(op, CallOp)))
        for name in (self.src, self.dst):
            _own_blocks(self.graph, self.sections[name], blocks)
            settle_mode(self.graph, self.sections[name])
        sizes = f"{_size(before)} -> {_size(_sent(self.graph, self.src, self.dst))} per sample from {self.src} to {self.dst}"
        what = f"{', '.join(blocks)} moved into {self.dst}" if blocks else "the boundary moved within glue"
        note(self.sections[self.dst], f"{what}: {sizes}")

    def _take(self, op: Operation) -> bool:
        """Compute an op of `src` in `dst`: move it if nothing else uses it, else compute it in both."""
        users = {section_of(u.operation) for r in op.results for u in r.uses}
        if self.dst not in users:
            return False
        if users == {self.dst}:
            set_section(op, self.dst)
        else:
            repeat(op, self.dst)
        return True


def _own_blocks(graph: GraphOp, section: SectionOp, moved: list[str]) -> None:
    """List those of the moved blocks that the section calls now."""
    calls = {op.target.data for case in graph.cases for op in case.ops if isinstance(op, CallOp) and section_of(op) == section.sym.data}
    kept = [b for b in strings(section.blocks) if b not in moved or b in calls]
    section.blocks = texts([*kept, *(b for b in moved if b in calls and b not in kept)])


def _crossings(graph: GraphOp, src: str, dst: str) -> Iterator[tuple[CaseOp, OpResult]]:
    """The values that one section sends to another, each with its case."""
    for case in graph.cases:
        for op in case.body.block.ops:
            if section_of(op) == src:
                yield from ((case, r) for r in op.results if any(section_of(u.operation) == dst for u in r.uses))


def _sent(graph: GraphOp, src: str, dst: str) -> float:
    """Expected bytes that go from one section to the other for a sample, gradients included."""
    statistics, wanted = Statistics(graph), {case: with_gradient(case) for case in graph.cases}
    found = _crossings(graph, src, dst)
    return sum(statistics.mean_in(case, nbytes(value)) * (2 if value in wanted[case] else 1) for case, value in found)


def _size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _merge(graph: GraphOp, src: str, dst: str, reason: str) -> None:
    merged = merge_sections(graph, src, dst)
    note(merged, f"sections {src} and {dst} are one: {reason}")
