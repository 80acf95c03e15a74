"""`sink-boundaries`: moves the boundaries of sections to where the fewest bytes cross.

A teacher's head moves into the student's section, so that hidden states travel in place of logits; slicing
and pooling glue moves to the producer, expanding glue to the consumer; of two tensors computed from each
other one is sent. The boundary of each pair of sections is a minimum cut
(`secc.passes.boundaries.boundary_min_cut`), priced by the cluster if one is given: duplicated work at the
rate of its devices, bytes at the bandwidth of the link, and a section takes over weights of up to an eighth
of a device's memory. Where edges can carry no boundary, the two sections are merged. The sections' attribute
`notes` says what was done.

Fewer bytes need not make a shorter step: that blocks move is a proposal, which `secc.driver.section_variants`
compares with a plan where they stay. `fixed` and `outcomes` are its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, OpResult
from xdsl.passes import ModulePass

from secc.cluster import Link, parse_cluster
from secc.ir.analysis.dataflow import SampleStatistics, find_gradient_values, value_bytes
from secc.ir.analysis.row_order import remove_unstacking
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    GraphOp,
    SectionOp,
    graph_of,
    section_of,
    set_section,
    strings_attr,
    strings_of,
)
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.boundaries.boundary_min_cut import BoundaryCut, BoundaryPrices, block_weight_bytes, call_work
from secc.passes.boundaries.fallback_cases import (
    drop_fallbacks,
    drop_incompatible_fallbacks,
    find_fallback_cases,
)
from secc.passes.boundaries.section_edges import build_edges, describe_crossing
from secc.passes.sections.assign_ops import duplicate_op, update_section_mode
from secc.passes.sections.merge_sections import add_section_notes, merge_sections

WEIGHT_BUDGET_DIVISOR = 8  # the part of a device's memory that weights of other sections may take


@dataclass(frozen=True)
class CutOutcome:
    """How moving blocks between two sections, "SRC>DST", was decided: step times in ns of the plan that was
    taken and of the other (None: it fits no device), found by closed forms or, if `simulated`, by simulated
    steps."""

    pair: str
    moved: bool
    step_ns: int
    other_ns: int | None
    simulated: bool

    def to_text(self) -> str:
        """Returns the text that pass options hold."""
        return f"{self.pair}:{self.moved:d}:{self.step_ns}:{self.other_ns or ''}:{self.simulated:d}"

    @classmethod
    def from_text(cls, text: str) -> CutOutcome:
        """Reads what `to_text` has written."""
        pair, moved, step_ns, other_ns, simulated = text.rsplit(":", 4)
        return cls(pair, moved == "1", int(step_ns), int(other_ns) if other_ns else None, simulated == "1")

    def __str__(self) -> str:
        how = "as simulated" if self.simulated else "by closed forms"
        src, _, dst = self.pair.partition(">")
        other = f"if they stay in {src}" if self.moved else f"if blocks of {src} move into {dst}"
        longer = "no plan fits" if self.other_ns is None else f"{self.other_ns / 10**9:.4g} s"
        return f"a step of {self.step_ns / 10**9:.4g} s {how}, {longer} {other}"


@dataclass(frozen=True)
class SinkBoundaries(ModulePass):
    """Options. cluster: as `secc.cluster.parse_cluster` reads it; "" where none is known: then
    `flops_per_byte` FLOPs cost as much time as sending a byte, and a section may grow by the share `growth`
    of its weights. pinned: sections that the user named; their blocks stay in them. fixed: pairs
    "SRC>DST" of sections between which only glue moves. outcomes: moves of blocks that were compared, as
    `CutOutcome.to_text`."""

    name = "sink-boundaries"
    flops_per_byte: int = BoundaryPrices.flops_per_byte
    growth: float = BoundaryPrices.growth
    cluster: str = ""
    pinned: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        while self._cut_all_pairs(graph):
            pass
        self._note_outcomes(graph)
        drop_incompatible_fallbacks(graph)
        while problem := next(iter(build_edges(graph)[1]), None):
            crossing, reason = problem
            _merge_with_note(
                graph,
                crossing.src,
                crossing.dst,
                f"{describe_crossing(crossing)} at {crossing.where} cannot cross: {reason}",
            )
        remove_unstacking(graph)

    def _cut_all_pairs(self, graph: GraphOp) -> bool:
        """Cut every pair of sections that exchanges values; True if two had to be merged, so that all pairs
        are cut again."""
        names = [s.sym.data for s in graph.sections]
        for j, dst in enumerate(names):
            for src in names[:j]:
                free = not {src, dst}.intersection(self.pinned) and f"{src}>{dst}" not in self.fixed
                prices, link = self._boundary_prices(graph), self._edge_link()
                if not settle_boundary(graph, src, dst, prices, link, free):
                    if spare := find_fallback_cases(graph):
                        drop_fallbacks(graph, spare)
                        return True
                    _merge_with_note(graph, src, dst, _why_no_boundary(graph, src, dst))
                    return True
        return False

    def _note_outcomes(self, graph: GraphOp) -> None:
        """Adds how the moves of blocks were decided to the notes of the sections that take or would take
        them."""
        sections = {s.sym.data: s for s in graph.sections}
        for outcome in map(CutOutcome.from_text, self.outcomes):
            src, _, dst = outcome.pair.partition(">")
            if dst in sections:
                what = f"blocks of {src} moved here" if outcome.moved else f"blocks of {src} stay there"
                add_section_notes(sections[dst], f"{what}: {outcome}")

    def _edge_link(self) -> Link | None:
        """The slowest link that edges between sections may have to use, None without a cluster."""
        cluster = parse_cluster(self.cluster) if self.cluster else None
        return cluster.slowest_link(cluster.ranks) if cluster is not None else None

    def _boundary_prices(self, graph: GraphOp) -> BoundaryPrices:
        link = self._edge_link()
        if link is None:
            return BoundaryPrices(self.flops_per_byte, self.growth)
        device = parse_cluster(self.cluster).device
        flops = (
            device.flops_per_us("bf16" if "dtype" in graph.attributes else _common_dtype(graph)) * 10**6
        )  # a second
        return BoundaryPrices(
            max(1, flops // link.bytes_per_s), max_moved_bytes=device.usable_memory // WEIGHT_BUDGET_DIVISOR
        )


def _common_dtype(graph: GraphOp) -> str:
    """The dtype of most blocks' results, which is the one they compute in."""
    calls = [op for case in graph.cases for op in case.ops if isinstance(op, CallOp) and op.results]
    found = Counter(tensor_type(call.results[0]).dtype.data for call in calls)
    return max(sorted(found), key=lambda name: found[name], default="f32")


def settle_boundary(
    graph: GraphOp,
    src: str,
    dst: str,
    prices: BoundaryPrices,
    link: Link | None = None,
    move_blocks: bool = True,
) -> bool:
    """Moves the boundary between two sections to where the fewest bytes cross; False if there is no possible
    boundary.

    With a `link`, the note says how long a sample's messages take over it. Unless `move_blocks`, only glue
    moves.
    """
    if not any(True for _ in _iter_crossings(graph, src, dst)):
        return True
    chosen = BoundaryCut(graph, src, dst, prices, move_blocks).find_dst_ops()
    if chosen is not None:
        _BoundaryMove(graph, src, dst, chosen, link).move_ops()
    return chosen is not None


class _BoundaryMove:
    """Moves the ops of a pair of sections to the side that the cut chose."""

    def __init__(
        self, graph: GraphOp, src: str, dst: str, computed_by_dst: set[Operation], link: Link | None
    ) -> None:
        self.graph, self.src, self.dst, self.chosen, self.link = graph, src, dst, computed_by_dst, link
        self.sections = {s.sym.data: s for s in graph.sections}

    def move_ops(self) -> None:
        ops = [op for case in self.graph.cases for op in case.ops]
        up = [op for op in ops if section_of(op) == self.dst and op not in self.chosen]
        down = [op for op in reversed(ops) if section_of(op) == self.src and op in self.chosen]
        if not up and not down:
            return
        before = _sent_bytes(self.graph, self.src, self.dst)
        for op in up:
            set_section(op, self.src)
        moved = [*up, *(op for op in down if self._move_or_duplicate(op))]
        if not moved:
            return
        blocks = list(dict.fromkeys(op.target.data for op in moved if isinstance(op, CallOp)))
        for name in (self.src, self.dst):
            _update_blocks(self.graph, self.sections[name], blocks)
            update_section_mode(self.graph, self.sections[name])
        add_section_notes(
            self.sections[self.dst],
            self._describe_move(blocks, before, _sent_bytes(self.graph, self.src, self.dst)),
        )

    def _describe_move(self, blocks: list[str], before: float, after: float) -> str:
        """The note: blocks that moved, bytes before and after, the work and weights that moved, and the time
        of a sample's messages."""
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
        said = (
            f"{what}: {_format_quantity(before)} -> {_format_quantity(after)} per sample from "
            f"{self.src} to {self.dst}"
        )
        if blocks:
            statistics = SampleStatistics(self.graph)
            here = [op for op in calls if section_of(op) == self.dst]
            work = sum(statistics.mean_in_case(_case_of(op), call_work(self.graph, op)) for op in here)
            held = sum(
                block_weight_bytes(block) for path, block in self.graph.blocks.items() if path in blocks
            )
            said += (
                f", with {_format_quantity(work, 'FLOP')} a sample and {_format_quantity(held)} of weights"
            )
        if self.link is not None:
            times = (f"{10**3 * size / self.link.bytes_per_s:.3g}" for size in (before, after))
            said += (
                f"; a sample's messages take {' -> '.join(times)} ms at "
                f"{self.link.bytes_per_s / 10**9:g} GB/s"
            )
        return said

    def _move_or_duplicate(self, op: Operation) -> bool:
        """Compute an op of `src` in `dst`: move it if nothing else uses it, else compute it in both."""
        users = {section_of(u.operation) for r in op.results for u in r.uses}
        if self.dst not in users:
            return False
        if users == {self.dst}:
            set_section(op, self.dst)
        else:
            duplicate_op(op, self.dst)
        return True


def _update_blocks(graph: GraphOp, section: SectionOp, moved: list[str]) -> None:
    """List those of the moved blocks that the section calls now."""
    calls = {
        op.target.data
        for case in graph.cases
        for op in case.ops
        if isinstance(op, CallOp) and section_of(op) == section.sym.data
    }
    kept = [b for b in strings_of(section.blocks) if b not in moved or b in calls]
    section.blocks = strings_attr([*kept, *(b for b in moved if b in calls and b not in kept)])


def _iter_crossings(graph: GraphOp, src: str, dst: str) -> Iterator[tuple[CaseOp, OpResult]]:
    """The values that one section sends to another, each with its case."""
    for case in graph.cases:
        for op in case.body.block.ops:
            if section_of(op) == src:
                yield from (
                    (case, r) for r in op.results if any(section_of(u.operation) == dst for u in r.uses)
                )


def _sent_bytes(graph: GraphOp, src: str, dst: str) -> float:
    """Expected bytes that go from one section to the other for a sample, gradients included."""
    statistics, wanted = SampleStatistics(graph), {case: find_gradient_values(case) for case in graph.cases}
    found = _iter_crossings(graph, src, dst)
    return sum(
        statistics.mean_in_case(case, value_bytes(value)) * (2 if value in wanted[case] else 1)
        for case, value in found
    )


def _case_of(op: Operation) -> CaseOp:
    case = op.parent_op()
    assert isinstance(case, CaseOp)
    return case


def _format_quantity(count: float, unit: str = "B") -> str:
    """Bytes, or FLOPs, for people."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} T{unit}"


def _why_no_boundary(graph: GraphOp, src: str, dst: str) -> str:
    """Says that no tensors between two sections can travel, with the reason of one that crosses now."""
    reason = "no boundary between them can be carried by rows per sample"
    for crossing, why in build_edges(graph)[1]:
        if (crossing.src, crossing.dst) == (src, dst):
            at = f" at {crossing.where}" if crossing.where else ""
            return f"{reason} ({describe_crossing(crossing)}{at}: {why})"
    return reason


def _merge_with_note(graph: GraphOp, src: str, dst: str, reason: str) -> None:
    merged = merge_sections(graph, src, dst)
    add_section_notes(merged, f"sections {src} and {dst} are one: {reason}")
