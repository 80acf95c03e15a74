"""`sink-boundaries`: moves the boundaries of sections to where the fewest bytes cross.

A teacher's head goes into the student's section, so that hidden states travel in place of logits; slicing and
pooling glue goes to the producer, expanding glue to the consumer; of two tensors computed from one another
one is sent. Each pair of sections is a minimum cut (`secc.passes.boundaries.boundary_min_cut`), priced by the cluster
where one is given: work computed twice at its devices' rate, bytes at the link that edges take, and a section
takes over weights of up to an eighth of a device's memory. Where no boundary can be carried by edges, the two
sections become one. What was done is kept in the sections' attribute `notes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, OpResult
from xdsl.passes import ModulePass

from secc.cluster import Link, parse
from secc.ir.analysis.dataflow import Statistics, nbytes, with_gradient
from secc.ir.analysis.row_order import put_together
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    GraphOp,
    SectionOp,
    graph_of,
    section_of,
    set_section,
    strings,
    texts,
)
from secc.ir.dialect.tensor_type import tensor
from secc.passes.boundaries.boundary_min_cut import Boundary, Prices, weight_bytes, work_of
from secc.passes.boundaries.fallback_cases import drop, drop_misfits, spare_cases
from secc.passes.boundaries.section_edges import edges_of, label
from secc.passes.sections.assign_ops import repeat, settle_mode
from secc.passes.sections.merge_sections import merge_sections, note

ROOM = 8  # the part of a device's memory that weights of other sections may take


@dataclass(frozen=True)
class SinkBoundaries(ModulePass):
    """`cluster` as `secc.cluster.parse` reads it; "" for text of which none is known, where `flops_per_byte`
    cost as much time as sending a byte and a section may grow by the share `growth` of its weights."""

    name = "sink-boundaries"
    flops_per_byte: int = Prices.flops_per_byte
    growth: float = Prices.growth
    cluster: str = ""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        while self._improve(graph):
            pass
        drop_misfits(graph)
        while problem := next(iter(edges_of(graph)[1]), None):
            crossing, reason = problem
            _merge(
                graph,
                crossing.src,
                crossing.dst,
                f"{label(crossing)} at {crossing.where} cannot cross: {reason}",
            )
        put_together(graph)

    def _improve(self, graph: GraphOp) -> bool:
        """Cut every pair of sections that exchanges values; True if two had to be merged, so that all pairs
        are cut again."""
        names = [s.sym.data for s in graph.sections]
        for j, dst in enumerate(names):
            for src in names[:j]:
                if not settle(graph, src, dst, self._prices(graph), self._link()):
                    if spare := spare_cases(graph):
                        drop(graph, spare)
                        return True
                    _merge(graph, src, dst, "no boundary between them can be carried by rows per sample")
                    return True
        return False

    def _link(self) -> Link | None:
        """What edges between sections may have to take."""
        cluster = parse(self.cluster) if self.cluster else None
        return cluster.link(cluster.ranks) if cluster is not None else None

    def _prices(self, graph: GraphOp) -> Prices:
        link = self._link()
        if link is None:
            return Prices(self.flops_per_byte, self.growth)
        device = parse(self.cluster).device
        flops = device.rate("bf16" if "dtype" in graph.attributes else _dtype(graph)) * 10**6  # a second
        return Prices(max(1, flops // link.bytes_per_s), room=device.usable // ROOM)


def _dtype(graph: GraphOp) -> str:
    """What most blocks give: what they compute in."""
    calls = [op for case in graph.cases for op in case.ops if isinstance(op, CallOp) and op.results]
    found = Counter(tensor(call.results[0]).dtype.data for call in calls)
    return max(sorted(found), key=lambda name: found[name], default="f32")


def settle(graph: GraphOp, src: str, dst: str, prices: Prices, link: Link | None = None) -> bool:
    """Move the boundary between two sections to where the fewest bytes cross; False if there is no possible
    boundary.

    With a `link`, the note says how long a sample's messages take over it.
    """
    if not any(True for _ in _crossings(graph, src, dst)):
        return True
    chosen = Boundary(graph, src, dst, prices).computed_by_dst()
    if chosen is not None:
        _Move(graph, src, dst, chosen, link).run()
    return chosen is not None


class _Move:
    """Moves the ops of a pair of sections to the side that the cut chose."""

    def __init__(
        self, graph: GraphOp, src: str, dst: str, computed_by_dst: set[Operation], link: Link | None
    ) -> None:
        self.graph, self.src, self.dst, self.chosen, self.link = graph, src, dst, computed_by_dst, link
        self.sections = {s.sym.data: s for s in graph.sections}

    def run(self) -> None:
        ops = [op for case in self.graph.cases for op in case.ops]
        up = [op for op in ops if section_of(op) == self.dst and op not in self.chosen]
        down = [op for op in reversed(ops) if section_of(op) == self.src and op in self.chosen]
        if not up and not down:
            return
        before = _sent(self.graph, self.src, self.dst)
        for op in up:
            set_section(op, self.src)
        moved = [*up, *(op for op in down if self._take(op))]
        if not moved:
            return
        blocks = list(dict.fromkeys(op.target.data for op in moved if isinstance(op, CallOp)))
        for name in (self.src, self.dst):
            _own_blocks(self.graph, self.sections[name], blocks)
            settle_mode(self.graph, self.sections[name])
        note(self.sections[self.dst], self._said(blocks, before, _sent(self.graph, self.src, self.dst)))

    def _said(self, blocks: list[str], before: float, after: float) -> str:
        """What moved, the bytes before and after, what work and weights came along, and what a sample's
        messages take."""
        calls = [
            op
            for case in self.graph.cases
            for op in case.ops
            if isinstance(op, CallOp) and op.target.data in blocks
        ]
        left = {op.target.data for op in calls if section_of(op) == self.src}
        moved = (
            [f"{', '.join(b for b in blocks if b not in left)} moved into {self.dst}"]
            if set(blocks) - left
            else []
        )
        both = [f"{', '.join(sorted(left))} computed in both"] if left else []
        what = "; ".join(moved + both) or "the boundary moved within glue"
        said = f"{what}: {_size(before)} -> {_size(after)} per sample from {self.src} to {self.dst}"
        if blocks:
            statistics = Statistics(self.graph)
            here = [op for op in calls if section_of(op) == self.dst]
            work = sum(statistics.mean_in(_case(op), work_of(self.graph, op)) for op in here)
            held = sum(weight_bytes(block) for path, block in self.graph.blocks.items() if path in blocks)
            said += f", with {_size(work, 'FLOP')} a sample and {_size(held)} of weights"
        if self.link is not None:
            times = (f"{10**3 * size / self.link.bytes_per_s:.3g}" for size in (before, after))
            said += f"; a sample's messages take {' -> '.join(times)} ms at {self.link.bytes_per_s / 10**9:g} GB/s"
        return said

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
    calls = {
        op.target.data
        for case in graph.cases
        for op in case.ops
        if isinstance(op, CallOp) and section_of(op) == section.sym.data
    }
    kept = [b for b in strings(section.blocks) if b not in moved or b in calls]
    section.blocks = texts([*kept, *(b for b in moved if b in calls and b not in kept)])


def _crossings(graph: GraphOp, src: str, dst: str) -> Iterator[tuple[CaseOp, OpResult]]:
    """The values that one section sends to another, each with its case."""
    for case in graph.cases:
        for op in case.body.block.ops:
            if section_of(op) == src:
                yield from (
                    (case, r) for r in op.results if any(section_of(u.operation) == dst for u in r.uses)
                )


def _sent(graph: GraphOp, src: str, dst: str) -> float:
    """Expected bytes that go from one section to the other for a sample, gradients included."""
    statistics, wanted = Statistics(graph), {case: with_gradient(case) for case in graph.cases}
    found = _crossings(graph, src, dst)
    return sum(
        statistics.mean_in(case, nbytes(value)) * (2 if value in wanted[case] else 1) for case, value in found
    )


def _case(op: Operation) -> CaseOp:
    case = op.parent_op()
    assert isinstance(case, CaseOp)
    return case


def _size(count: float, unit: str = "B") -> str:
    """Bytes, or FLOPs, for people."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} T{unit}"


def _merge(graph: GraphOp, src: str, dst: str, reason: str) -> None:
    merged = merge_sections(graph, src, dst)
    note(merged, f"sections {src} and {dst} are one: {reason}")
