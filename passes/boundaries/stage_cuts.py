"""Finds where a section can be cut into pipeline stages: orders its calls, and lists the calls after which
everything that crosses can be sent or computed again.

A *unit* is a call of a block with the glue behind it, up to the next call. Cases share their units (a block's
n-th call at a place), in one order that all cases agree with; where two cases call blocks in different orders
there is no cut between them. A cut after a unit is possible if every value that crosses it can be sent, or is
glue that later stages can compute again from values that can be sent.

Calls have the order in which the user makes them, but calls that need no layer of the section come before
their first user, or at the end. A teacher's head next to a student's layers, called first and used last,
would otherwise send logits through all stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation, OpResult, SSAValue

from secc.ir.analysis.dataflow import SampleStatistics, find_gradient_values, is_random_op, value_bytes
from secc.ir.analysis.layers import layers_of_blocks
from secc.ir.analysis.random_ops import call_site
from secc.ir.analysis.transferable_values import NotTransferable, whole_layout
from secc.ir.dialect.ops import CallOp, CaseOp, GlueOp, GraphOp, section_of
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.boundaries.boundary_min_cut import reads_trainable_parameters
from secc.passes.boundaries.section_edges import ValueCrossing, describe_crossing, op_identities

CallKey = tuple[
    str, str, int
]  # a block, the lines that call it where they tell its calls apart, and which of these calls in a case


@dataclass
class StageUnits:
    """The units of a section: the calls in order, the unit of each op, and for each possible cut (after which
    unit) the bytes that cross it for a mean sample. `impossible` has the reason against each other cut, with
    the user's file:line."""

    graph: GraphOp
    section: str
    calls: list[CallKey] = field(default_factory=list[CallKey])
    unit_of_op: dict[Operation, int] = field(default_factory=dict[Operation, int])
    cuts: dict[int, float] = field(default_factory=dict[int, float])
    impossible: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])

    def __post_init__(self) -> None:
        # 1. One order of units for all cases. 2. Each op gets a unit. 3. All cuts start as possible at no
        # cost; each case then forbids cuts, or adds the bytes that cross them.
        sequences = [self._delay_independent_calls(self._keyed_calls(case)) for case in self.graph.cases]
        for sequence in sequences:
            self._merge_sequence([key for key, _ in sequence])
        number = {key: i for i, key in enumerate(self.calls)}
        for case, sequence in zip(self.graph.cases, sequences, strict=True):
            self.unit_of_op |= {op: number[key] for key, op in sequence}
            self._assign_units(case)
        self.cuts = dict.fromkeys(range(len(self.calls) - 1), 0.0)
        self._forbid_cuts_in_memories()
        for sequence in sequences:
            self._forbid_reordered_cuts([number[key] for key, _ in sequence])
        for case in self.graph.cases:
            self._add_crossing_bytes(case)
        self._leave_out_wide_cuts_in_layers()

    @property
    def layers(self) -> list[int]:
        """The units with layers, or with parts of layers; all units if there are none."""
        layers = self._layer_calls(self.calls)
        return [i for i, key in enumerate(self.calls) if key in layers]

    def _layer_calls(self, calls: Sequence[CallKey]) -> set[CallKey]:
        """The calls of layers, or of parts of layers; all calls where there are none."""
        layers = layers_of_blocks(self.graph.blocks[path] for path in {path for path, *_ in calls})
        return {key for key in calls if key[0] in layers} or set(calls)

    def _section_ops(self, case: Operation | None) -> list[Operation]:
        return [op for op in case.ops if section_of(op) == self.section] if isinstance(case, CaseOp) else []

    def _keyed_calls(self, case: CaseOp) -> list[tuple[CallKey, Operation]]:
        seen: Counter[tuple[str, str]] = Counter()
        found: list[tuple[CallKey, Operation]] = []
        for op in self._section_ops(case):
            if isinstance(op, CallOp):
                found.append(((*(called := (op.target.data, call_site(op))), seen[called]), op))
                seen[called] += 1
        return found

    def _delay_independent_calls(
        self, called: list[tuple[CallKey, Operation]]
    ) -> list[tuple[CallKey, Operation]]:
        """Returns the calls of a case in order, moving each call that needs no layer to just before its first
        user."""
        layers = self._layer_calls([key for key, _ in called])
        # `fixed` become the layers and every call that needs one; these keep their order. The other calls are
        # inserted from last to first, so that a call finds its users in `order` even if they were moved too.
        fixed = {op for key, op in called if key in layers}
        behind: dict[Operation, set[Operation]] = {}  # the calls that an op needs
        for op in self._section_ops(called[0][1].parent_op()) if called else ():
            sources = {o.owner for o in op.operands if isinstance(o.owner, Operation)}
            behind[op] = set[Operation]().union(
                *({s} if isinstance(s, CallOp) else behind[s] for s in sources if s in behind)
            )
            if isinstance(op, CallOp) and behind[op] & fixed:
                fixed.add(op)
        order = [pair for pair in called if pair[1] in fixed]
        for pair in reversed([pair for pair in called if pair[1] not in fixed]):
            first = next((i for i, (_, user) in enumerate(order) if pair[1] in behind[user]), len(order))
            order.insert(first, pair)
        return order

    def _merge_sequence(self, sequence: Sequence[CallKey]) -> None:
        """Inserts the calls that other cases do not have after the calls that precede them."""
        place = 0
        for key in sequence:
            if key in self.calls:
                place = max(place, self.calls.index(key) + 1)
            else:
                self.calls.insert(place, key)
                place += 1

    def _assign_units(self, case: CaseOp) -> None:
        """The unit of each op: of its latest producer, or else of its first user; what depends on nothing is
        at the end."""
        ops = self._section_ops(case)
        # Forward: glue joins its latest producer's unit. Backward: what has no producer joins its first user.
        for op in ops:
            behind = [
                self.unit_of_op[o.owner]
                for o in op.operands
                if isinstance(o.owner, Operation) and o.owner in self.unit_of_op
            ]
            if op not in self.unit_of_op and behind:
                self.unit_of_op[op] = max(behind)
        for op in reversed(ops):
            ahead = [
                self.unit_of_op[u.operation]
                for r in op.results
                for u in r.uses
                if u.operation in self.unit_of_op
            ]
            if op not in self.unit_of_op:
                self.unit_of_op[op] = min(ahead, default=len(self.calls) - 1)

    # -- cuts
    # ----------------------------------------------------------------------------------------------

    def _forbid_cuts_in_memories(self) -> None:
        """A block that reads what another call of it has kept makes all its calls on one rank."""
        for path, block in self.graph.blocks.items():
            own = [unit for unit, (called, *_) in enumerate(self.calls) if called == path]
            if block.remembers is None or not own:
                continue
            reason = f"{path} keeps a tensor on itself in one call and uses it in another, on the same rank"
            for cut in range(own[0], own[-1]):
                self._forbid_cut(cut, reason, block.remembers.data)

    def _forbid_reordered_cuts(self, sequence: Sequence[int]) -> None:
        # A case that calls `unit` after a later one would pass each cut between them there and back.
        latest = -1
        for unit in sequence:
            for cut in range(unit, latest):
                self._forbid_cut(cut, "its blocks are called in different orders by different samples", "")
            latest = max(latest, unit)

    def _forbid_cut(self, cut: int, reason: str, where: str) -> None:
        self.cuts.pop(cut, None)
        self.impossible.setdefault(cut, (reason, where))

    def _add_crossing_bytes(self, case: CaseOp) -> None:
        """Adds the bytes that cross each cut in one case, and forbids cuts that a value cannot cross."""
        statistics, wanted, at = SampleStatistics(self.graph), find_gradient_values(case), op_identities(case)

        def bytes_of(value: SSAValue) -> int:
            return round(statistics.mean_in_case(case, value_bytes(value)) * (2 if value in wanted else 1))

        made_of = self._sources_again(case)
        sent: dict[int, set[SSAValue]] = {}  # by cut: what crosses and is sent, what may be computed again
        again: dict[int, list[OpResult]] = {}
        for value, last in self._iter_long_lived(case):
            first = self.unit_of_op[value.owner]
            stuck = self._reason_stuck(value)
            for cut in range(first, last):
                if stuck:
                    crossing = ValueCrossing(
                        case, value, "", "", (*at[value.owner], value.index), frozenset(), False, False
                    )
                    self._forbid_cut(
                        cut, f"{describe_crossing(crossing)} cannot cross: {stuck}", crossing.where
                    )
                elif cut in self.cuts and not _is_recomputable(value.owner):
                    sent.setdefault(cut, set()).add(value)
                elif cut in self.cuts:
                    again.setdefault(cut, []).append(value)
        for cut in self.cuts.keys() & (sent.keys() | again.keys()):
            own = sent.get(cut, set[SSAValue]())
            self.cuts[cut] += sum(map(bytes_of, own))
            # Glue is sent, or what it is computed from is.
            needed = [v for v in again.get(cut, ()) if made_of[v] - own]
            sources = set[SSAValue]().union(*(made_of[v] for v in needed)) - own
            self.cuts[cut] += min(sum(map(bytes_of, needed)), sum(map(bytes_of, sources)))

    def _leave_out_wide_cuts_in_layers(self) -> None:
        """Leaves out cuts between parts of a layer that more bytes cross than the cut behind the layer, such
        as those between a norm and the attention, around which the norm's input passes."""
        layers = layers_of_blocks(self.graph.blocks.values())
        ends = {layers[path]: unit for unit, (path, *_) in enumerate(self.calls) if path in layers}
        for cut in [*self.cuts]:
            end = ends.get(layers.get(self.calls[cut][0], ""), cut)
            if cut < end and self.cuts[cut] > self.cuts.get(end, self.cuts[cut]):
                del self.cuts[cut]

    def _sources_again(self, case: CaseOp) -> dict[SSAValue, set[SSAValue]]:
        """For each result of a case in this section, the results that stages have to get for it: itself, or
        what glue that can be computed again makes it of."""
        found: dict[SSAValue, set[SSAValue]] = {}
        for op in self._section_ops(case):
            of_operands = set[SSAValue]().union(*(found.get(o, ()) for o in op.operands))
            again = _is_recomputable(op)
            found |= {r: of_operands if again else {r} for r in op.results}
        return found

    def _iter_long_lived(self, case: CaseOp) -> Iterator[tuple[OpResult, int]]:
        """The values of a case that are used in later units than their own, with the last of these."""
        for op in self._section_ops(case):
            for result in op.results:
                last = max(
                    (self.unit_of_op[u.operation] for u in result.uses if u.operation in self.unit_of_op),
                    default=-1,
                )
                if last > self.unit_of_op[op]:
                    yield result, last

    def _reason_stuck(self, value: SSAValue) -> str:
        """Why a value can neither be sent nor be computed again, "" if it can."""
        op = value.owner
        if not isinstance(op, Operation) or op not in self.unit_of_op:
            return ""
        try:
            whole_layout(self.graph, tensor_type(value))
        except NotTransferable as reason:
            if not _is_recomputable(op):
                return str(reason)
            return next((why for o in op.operands if (why := self._reason_stuck(o))), "")
        return ""


def _is_recomputable(op: Operation) -> bool:
    """Whether a later stage may compute an op again: glue that draws nothing and reads no parameters that
    train."""
    return isinstance(op, GlueOp) and not is_random_op(op) and not reads_trainable_parameters(op)


def balance_stages(times: Sequence[int], cuts: dict[int, float], parts: int) -> list[int] | None:
    """Divides units into `parts` stages by dynamic programming: the longest stage as short as possible, then
    the fewest bytes. Returns the last unit of each stage but the last one, None if there is no such cut.

    times: ns of each unit. cuts: bytes that cross each possible cut.
    """
    # The first run finds the shortest longest stage; the second one takes it as a limit and minimises bytes,
    # then the sum of squares of the stages' times, which is least for even ones.
    ends = [*sorted(cuts), len(times) - 1]
    sums = [0]
    for time in times:
        sums.append(sums[-1] + time)
    longest = _best_partition(ends, sums, cuts, parts, limit=None)
    return (
        None
        if longest is None
        else (_best_partition(ends, sums, cuts, parts, limit=longest[0][0]) or longest)[1]
    )


ScoredPartition = tuple[tuple[float, float], list[int]]  # what is to be small, and where it is cut


def _best_partition(
    ends: Sequence[int], sums: Sequence[int], cuts: dict[int, float], parts: int, limit: float | None
) -> ScoredPartition | None:
    """The best partition by its longest part; by bytes and evenness where `limit` bounds each part."""
    found: dict[int, ScoredPartition] = {-1: ((0, 0), [])}
    # found[end]: best division of units 0 … end into `part` parts, with the ends of all parts.
    for part in range(parts):
        after: dict[int, ScoredPartition] = {}
        for end in ends:
            # The last part, and no other, ends at the last unit.
            if (part == parts - 1) != (end == len(sums) - 2):
                continue
            for start, (cost, at) in found.items():
                time = sums[end + 1] - sums[start + 1]
                if start >= end or (limit is not None and time > limit):
                    continue
                if limit is None:
                    value = (max(cost[0], float(time)), cost[1])
                else:
                    value = (cost[0] + cuts.get(end, 0.0), cost[1] + float(time) ** 2)
                if end not in after or value < after[end][0]:
                    after[end] = (value, [*at, end])
        found = after
    done = found.get(len(sums) - 2)
    return None if done is None else (done[0], done[1][:-1])
