"""The cheapest boundary between two sections: which of their ops the consumer computes, as a minimum cut.

Every op of the producer section `src` and of the consumer section `dst` is a node, on the sink's side if
`dst` computes it. A value that is produced on the source's side and used on the other is sent: that costs its
expected bytes per sample, twice if its gradient comes back, and is forbidden where no edge can carry it. A
block of `src` may move to `dst` where there is room for its weights: its work is then done once as before, by
the ranks that `allocate` gives it there. The blocks that `src` starts with stay, and blocks stay where most
of its work would move: the step gets longer if `dst` does the work of both, and whether the two share ranks
is for `allocate` to say. Blocks never move into or out of a section that the user pinned. Computing a block
in both costs its work. An op of `dst` may move to `src` if all it needs is there. Cases share their nodes
(ops at the same place in the user's code), so that all cases are cut at the same places.

A boundary at which every sample of `dst` has its rows is preferred. Where there is none, tensors that `src`
computes for some samples alone may cross: a micro-batch of other samples runs a case without them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from xdsl.ir import Operation, OpResult, SSAValue

from secc.ir.analysis.dataflow import (
    SampleStatistics,
    ValueOrigin,
    call_flops,
    call_mode,
    classify_origins,
    find_gradient_values,
    get_number,
    is_random_op,
    producer_of,
    value_bytes,
)
from secc.ir.analysis.recorded_glue import FALLBACK_ATTRIBUTE, recorded_label
from secc.ir.analysis.row_order import RowOrder
from secc.ir.analysis.transferable_values import can_transfer
from secc.ir.analysis.whole_batch import whole_batch_of_block
from secc.ir.dialect.digraph import MinCutNetwork
from secc.ir.dialect.ops import BlockOp, CallOp, CaseOp, GlueOp, GraphOp, ParamOp, section_of, strings_of
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.boundaries.section_edges import op_identities

_MOVED_SHARE = 0.5  # of the work of `src`: blocks that do more of it do not move
# price of glue computed elsewhere, in bytes sent for each byte of its results: memory is this much faster
# than a network
_GLUE_PRICE = 0.02


@dataclass(frozen=True)
class BoundaryPrices:
    """The price of a FLOP in bytes sent (`flops_per_byte`), and the weights that a section may take over:
    `max_moved_bytes`, or where that is None the share `growth` of its own."""

    flops_per_byte: int = 20000
    growth: float = 0.25
    max_moved_bytes: int | None = None


class BoundaryCut:
    """The minimum cut between one pair of sections, `src` before `dst`."""

    def __init__(
        self,
        graph: GraphOp,
        src: str,
        dst: str,
        prices: BoundaryPrices,
        move_blocks: bool = True,
        every_sample: bool = True,
    ) -> None:
        self.graph, self.src, self.dst, self.move_blocks = graph, src, dst, move_blocks
        self.every_sample = every_sample
        self.statistics, self.cut = SampleStatistics(graph), MinCutNetwork()
        self.sections = {s.sym.data: s for s in graph.sections}
        self.prices, self._sendable, self.blocks = (
            prices,
            dict[tuple[TensorType, str, bool], bool](),
            graph.blocks,
        )
        own = sum(block_weight_bytes(self.blocks[b]) for b in strings_of(self.sections[dst].blocks))
        self.room = prices.growth * own if prices.max_moved_bytes is None else prices.max_moved_bytes

    def can_transfer(self, kind: TensorType, src: str, mixed: bool) -> bool:
        """Whether an edge can carry a tensor of type `kind` from section `src` to `dst`; `mixed`: its rows
        are out of order."""
        key = kind, src, mixed
        if key not in self._sendable:
            self._sendable[key] = can_transfer(
                self.graph, kind, self.sections[src], self.sections[self.dst], mixed, self.every_sample
            )
        return self._sendable[key]

    def find_dst_ops(self) -> set[Operation] | None:
        """The ops of the two sections that `dst` should compute, in all cases; None if there is no possible
        boundary."""
        networks = [_CaseNetwork(self, case) for case in self.graph.cases]
        for network in networks:
            network.add_case_ops()
        side = self.cut.min_cut_sink_side()
        if side is None:
            return self._changed(every_sample=False).find_dst_ops() if self.every_sample else None
        found = {op for network in networks for op in network.case.ops if network.at[op] in side}
        if self.move_blocks and self._moved_share(found) > _MOVED_SHARE:
            return self._changed(move_blocks=False).find_dst_ops()
        return found

    def _changed(self, **options: bool) -> BoundaryCut:
        """The cut of the same pair with other options."""
        known = {"move_blocks": self.move_blocks, "every_sample": self.every_sample}
        return BoundaryCut(self.graph, self.src, self.dst, self.prices, **known | options)

    def _moved_share(self, dst_ops: Collection[Operation]) -> float:
        """The share of the expected work of `src` that `dst` would do with these ops."""
        work = {
            op: self.statistics.mean_in_case(case, call_work(self.graph, op))
            for case in self.graph.cases
            for op in case.ops
            if isinstance(op, CallOp) and section_of(op) == self.src
        }
        moved = sum(work[op] for op in work if op in dst_ops)
        return moved / total if (total := sum(work.values())) else 0.0


class _CaseNetwork:
    """The part of the network that one case adds."""

    def __init__(self, boundary: BoundaryCut, case: CaseOp) -> None:
        self.b, self.case, self.cut = boundary, case, boundary.cut
        self.at, self.origin, self.wanted = (
            op_identities(case),
            classify_origins(case),
            find_gradient_values(case),
        )
        self.first, self.mixed = _first_calls(case, boundary.src), RowOrder(boundary.graph, case).out_of_order
        self.movable = {op for op in case.ops if section_of(op) == boundary.src and self._may_move_down(op)}
        self.blocks_move = any(isinstance(op, CallOp) for op in self.movable)

    def add_case_ops(self) -> None:
        for op in self.case.ops:
            section = section_of(op)
            if section == self.b.src:
                self._add_producer_op(op)
            elif section == self.b.dst:
                self._add_consumer_op(op)
            elif section is not None and any(
                section_of(u.operation) == self.b.src for r in op.results for u in r.uses
            ):
                self.cut.tie_to_source(self.at[op], None)
                self._add_send_costs(op)

    def _add_producer_op(self, op: Operation) -> None:
        movable = op in self.movable
        once = 1.0 if isinstance(op, CallOp) else self._duplication_cost(op)
        self.cut.tie_to_source(self.at[op], once if movable else None)
        # Once blocks may move, it matters whether `src` still computes an op that `dst` computes: the work of
        # a block would be paid twice. A second node stands for what `src` computes.
        if movable and self.blocks_move:
            self._add_src_copy(op)
        self._require_operands(op)
        self._add_send_costs(op)

    def _add_src_copy(self, op: Operation) -> None:
        """A node for what `src` computes of an op, where others need it there. A block that is computed in
        both costs its work."""
        copy = self._copy_node(op)
        # The copy is on the source's side if `src` computes the op: always if `dst` does not, and if a user
        # in `src` or in another section needs the result from there.
        self.cut.add_arc(self.at[op], copy, None)
        if isinstance(op, CallOp):
            self.cut.add_arc(copy, self.at[op], self._duplication_cost(op))
        for user in (u.operation for r in op.results for u in r.uses):
            if section_of(user) in {self.b.src, self.b.dst}:
                self.cut.add_arc(self._copy_node(user), copy, None)
            else:
                self.cut.tie_to_source(copy, None)

    def _copy_node(self, op: Operation) -> object:
        return ("copy", self.at[op]) if self.blocks_move and op in self.movable else self.at[op]

    def _add_consumer_op(self, op: Operation) -> None:
        movable = self._may_move_up(op)
        self.cut.tie_to_sink(self.at[op], self._duplication_cost(op) if movable else None)
        # An op moves up only together with its producers in `dst`: `src` receives nothing from `dst`.
        for operand in self._require_operands(op):
            if movable and section_of(operand.owner) == self.b.dst:
                self.cut.add_arc(self.at[op], self.at[operand.owner], None)
        self._add_send_costs(op)

    def _require_operands(self, op: Operation) -> list[OpResult]:
        """Computing an op needs its operands, other than inputs and parameters, on its side."""
        found = [o for o in op.operands if isinstance(o, OpResult) and section_of(o.owner) is not None]
        for operand in found:
            self.cut.add_arc(self._value_node(operand), self.at[op], None)
        return found

    def _add_send_costs(self, op: Operation) -> None:
        """Sending a value costs its bytes; one that goes to `dst` from elsewhere anyway is free."""
        for result in op.results:
            section = section_of(op) or ""
            elsewhere = section not in {self.b.src, self.b.dst}
            if elsewhere and any(section_of(u.operation) == self.b.dst for u in result.uses):
                price = 0.0
            elif self.b.can_transfer(
                tensor_type(result), section if elsewhere else self.b.src, result in self.mixed
            ):
                price = self._message_bytes(result)
            else:
                price = None
            # The value's own node stands between producer and users, so that several users pay once.
            self.cut.add_arc(self.at[op], self._value_node(result), price)

    def _value_node(self, value: OpResult) -> tuple[object, int]:
        return self.at[value.owner], value.index

    def _message_bytes(self, value: SSAValue) -> float:
        """Expected bytes of a value for one sample, both ways; at least one, so that nothing is sent in
        vain."""
        return max(
            1.0,
            self.b.statistics.mean_in_case(self.case, value_bytes(value))
            * (2 if value in self.wanted else 1),
        )

    def _duplication_cost(self, op: Operation) -> float:
        """The cost, in bytes sent, of computing an op in the other section; at least 1, so that no op moves
        without a gain."""
        if isinstance(op, CallOp):
            return max(
                1.0,
                self.b.statistics.mean_in_case(self.case, call_work(self.b.graph, op))
                / self.b.prices.flops_per_byte,
            )
        return max(1.0, _GLUE_PRICE * sum(self._message_bytes(r) for r in op.results))

    def _may_move_down(self, op: Operation) -> bool:
        """Glue that reads no parameter that trains, and frozen blocks that the consumer has room for."""
        if isinstance(op, CallOp):
            block = self.b.blocks[op.target.data]
            if whole_batch_of_block(block):
                return False
            room = block_weight_bytes(block) <= self.b.room
            return self.b.move_blocks and call_mode(op) == "forward" and room and op not in self.first
        return isinstance(op, GlueOp) and not is_random_op(op) and not reads_trainable_parameters(op)

    def _may_move_up(self, op: Operation) -> bool:
        """Glue on values of the two sections alone, used in `dst` alone."""
        if FALLBACK_ATTRIBUTE in self.case.attributes and recorded_label(op) is not None:
            return False
        if (
            not isinstance(op, GlueOp)
            or is_random_op(op)
            or reads_trainable_parameters(op)
            or self.origin[op.results[0]] is not ValueOrigin.MODEL
        ):
            return False
        near = {section_of(producer_of(o)) for o in op.operands} - {None}
        return near <= {self.b.src, self.b.dst} and all(
            section_of(u.operation) == self.b.dst for r in op.results for u in r.uses
        )


def _first_calls(case: CaseOp, section: str) -> set[Operation]:
    """The calls of a section that need none of its others."""
    made, first = set[SSAValue](), set[Operation]()
    for op in case.ops:
        behind = any(o in made for o in op.operands)
        if isinstance(op, CallOp) and section_of(op) == section:
            made.update(op.results)
            first |= set() if behind else {op}
        elif behind:
            made.update(op.results)
    return first


def reads_trainable_parameters(op: Operation) -> bool:
    """Whether an op reads trainable parameters; one section alone may, since it computes their gradients."""
    return any(isinstance(producer_of(o), ParamOp) and tensor_type(o).requires_grad for o in op.operands)


def block_weight_bytes(block: BlockOp) -> int:
    """Bytes of a block's weights, float32 where their dtype is not noted."""
    known = get_number(block, "bytes")
    return 4 * block.params.data if known is None else int(known)


def call_work(graph: GraphOp, call: CallOp) -> Expr | int:
    """FLOPs of a call; before they are measured, two for each parameter and row of its first result."""
    known = call_flops(call)
    if known is not None:
        return known
    rows: Expr | int = 2 * graph.blocks[call.target.data].params.data
    for dim in tensor_type(call.results[0]).shape[:-1]:
        rows = dim * rows
    return rows
