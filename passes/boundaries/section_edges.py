"""Edges between sections: which values cross, and which crossings of different cases are one edge.

Crossings of different cases are one edge if they have the same ends and type and the same producer (the block
or op, at its place in the user's code), or else the same consumer: text alone enters the decoder where text
with its image enters in the next case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xdsl.ir import Operation, OpResult, SSAValue

from secc.ir.analysis.dataflow import find_gradient_operands, find_gradient_values, get_string, producer_of
from secc.ir.analysis.random_ops import call_site
from secc.ir.analysis.row_order import RowOrder
from secc.ir.analysis.transferable_values import (
    WHOLE_TENSOR,
    NotTransferable,
    TransferLayout,
    has_no_rows,
    layout_between,
)
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, GraphOp, ParamOp, section_of, strings_of
from secc.ir.dialect.readable_names import make_unique, shortest_tail, to_identifier
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.ir.text_io.verifier import source_line
from secc.runtime.plan.sample_predicates import is_active

CrossingProblem = tuple["ValueCrossing", str]
# (target, file:line and the lines that lead there, number among ops with the same of these, index of the
# result or operand)
ValueIdentity = tuple[str, str, int, int]


@dataclass(frozen=True, eq=False)
class ValueCrossing:
    """A value of one case, produced in section `src` and used in section `dst`."""

    case: CaseOp
    value: OpResult
    src: str
    dst: str
    producer_identity: ValueIdentity
    consumer_identities: frozenset[ValueIdentity]
    grad: bool  # whether a gradient of the loss comes back from `dst`
    rows_mixed: bool  # whether its rows are out of order

    @property
    def producer(self) -> Operation:
        return self.value.owner

    @property
    def where(self) -> str:
        return source_line(self.producer)


@dataclass
class SectionEdge:
    """Crossings, at most one for each case, that are one edge."""

    name: str
    src: str
    dst: str
    type: TensorType  # with a gradient if it takes one in any case
    layout: TransferLayout
    crossings: list[ValueCrossing] = field(default_factory=list[ValueCrossing])

    def accepts_crossing(self, crossing: ValueCrossing) -> bool:
        """Whether a crossing of another case could be this edge."""
        ends = (crossing.src, crossing.dst) == (self.src, self.dst)
        kind = tensor_type(crossing.value)
        same_type = (kind.dims, kind.dtype) == (self.type.dims, self.type.dtype)
        return ends and same_type and all(c.case is not crossing.case for c in self.crossings)


def find_crossings(graph: GraphOp, case: CaseOp) -> list[ValueCrossing]:
    """The values that cross sections in a case, each once for each section that uses it, in the order of the
    case."""
    at, wanted, mixed = op_identities(case), find_gradient_values(case), RowOrder(graph, case).out_of_order
    found: list[ValueCrossing] = []
    for op in case.ops:
        src = section_of(op)
        for result in op.results if src is not None else ():
            # Sorted by identity, because `uses` has no order that is the same in all cases.
            uses = sorted(result.uses, key=lambda u: (at[u.operation], u.index))
            ends = dict.fromkeys(end for u in uses if (end := section_of(u.operation)) not in {None, src})
            for dst in ends:
                users = [u for u in uses if section_of(u.operation) == dst]
                used = frozenset((*at[u.operation], u.index) for u in users)
                grad = any(result in find_gradient_operands(u.operation, wanted) for u in users)
                found.append(
                    ValueCrossing(
                        case,
                        result,
                        str(src),
                        str(dst),
                        (*at[op], result.index),
                        used,
                        grad,
                        result in mixed,
                    )
                )
    return found


def op_identities(case: CaseOp) -> dict[Operation, tuple[str, str, int]]:
    """The identity of each op across cases: its section and target, its place in the user's code, and its
    number among ops with the same of these."""
    seen: dict[tuple[str, str], int] = {}
    found: dict[Operation, tuple[str, str, int]] = {}
    for op in case.ops:
        target = get_string(op, "target") or get_string(op, "sym")
        key = (f"{section_of(op)} {op.name} {target}", f"{source_line(op)} {call_site(op)}")
        found[op] = (*key, seen.get(key, 0))
        seen[key] = seen.get(key, 0) + 1
    return found


def build_edges(graph: GraphOp) -> tuple[list[SectionEdge], list[CrossingProblem]]:
    """The edges of all cases, and the crossings that cannot be edges, each with the reason."""
    builder = _EdgeBuilder(graph)
    for case in graph.cases:
        builder.add_crossings(find_crossings(graph, case))
    builder.problems += [p for edge in builder.edges if (p := _find_missing_case(graph, edge))]
    return builder.edges, builder.problems


def _find_missing_case(graph: GraphOp, edge: SectionEdge) -> CrossingProblem | None:
    """Where both sections are active but a case lacks the edge, its samples must have no rows: micro-batches
    of two sections mix cases."""
    sections = {s.sym.data: strings_of(s.when) for s in graph.sections}
    having = {id(c.case) for c in edge.crossings}
    for case in graph.cases:
        pattern = strings_of(case.when)
        absent = [key for key in strings_of(graph.optional) if key not in pattern]
        both = edge.layout != WHOLE_TENSOR and all(
            is_active(sections[end], pattern) for end in (edge.src, edge.dst)
        )
        if both and id(case) not in having and not has_no_rows(graph, edge.layout.rows, absent):
            return edge.crossings[
                0
            ], f"case {case.sym.data!r} computes without it, and a sample of that case would have rows of it"
    return None


class _EdgeBuilder:
    """Collects the crossings of one case after the other into edges."""

    def __init__(self, graph: GraphOp) -> None:
        self.graph = graph
        self.sections = {s.sym.data: s for s in graph.sections}
        self.edges: list[SectionEdge] = []
        self.problems: list[CrossingProblem] = []

    def add_crossings(self, found: list[ValueCrossing]) -> None:
        # The same op in two cases is the same edge. What is left may still feed the same operand of the same
        # consumer (two cases compute it by different ops); then it shares that consumer's edge.
        left = [
            c
            for c in found
            if not self._join_edge(c, lambda a, b: a.producer_identity == b.producer_identity)
        ]
        for crossing in left:
            if not self._join_edge(
                crossing, lambda a, b: bool(a.consumer_identities & b.consumer_identities)
            ):
                self._open_edge(crossing)

    def _join_edge(
        self, crossing: ValueCrossing, matches: Callable[[ValueCrossing, ValueCrossing], bool]
    ) -> bool:
        for edge in self.edges:
            if edge.accepts_crossing(crossing) and any(matches(crossing, other) for other in edge.crossings):
                edge.crossings.append(crossing)
                edge.type = _with_grad(edge.type, edge.type.requires_grad or crossing.grad)
                return True
        return False

    def _open_edge(self, crossing: ValueCrossing) -> None:
        kind = tensor_type(crossing.value)
        try:
            how = layout_between(
                self.graph,
                kind,
                self.sections[crossing.src],
                self.sections[crossing.dst],
                crossing.rows_mixed,
            )
        except NotTransferable as reason:
            self.problems.append((crossing, str(reason)))
        else:
            kind = _with_grad(kind, crossing.grad)
            self.edges.append(
                SectionEdge(self._edge_name(crossing), crossing.src, crossing.dst, kind, how, [crossing])
            )

    def _edge_name(self, crossing: ValueCrossing) -> str:
        taken = [e.name for e in self.edges]
        base = edge_label(self.graph, crossing.value)
        return base if base not in taken else make_unique(f"{base}_to_{crossing.dst}", taken)


def _with_grad(kind: TensorType, grad: bool) -> TensorType:
    return TensorType.from_dims([d.data for d in kind.dims], kind.dtype.data, grad)


def edge_label(graph: GraphOp, value: SSAValue) -> str:
    """A name for a value: its block with the path of the output; for glue the nearest block or parameter."""
    for op in _iter_upstream(value):
        if isinstance(op, CallOp):
            short = shortest_tail(op.target.data, list(graph.blocks))
            index = next((i for i, r in enumerate(op.results) if r is value), None)
            output = "" if index is None else strings_of(op.outs)[index].strip('.[]"0')
            return to_identifier(f"{short}_{output}" if output else short)
        if isinstance(op, ParamOp):
            return to_identifier(op.path.data.removesuffix(".weight"))
    return "value"


def _iter_upstream(value: SSAValue) -> Iterator[Operation]:
    """The ops that a value comes from, nearest first."""
    queue, seen = [producer_of(value)], set[Operation]()
    while queue:
        op = queue.pop(0)
        if op not in seen:
            seen.add(op)
            yield op
            queue += [producer_of(o) for o in op.operands]


def describe_crossing(crossing: ValueCrossing) -> str:
    """A crossing's value for messages: its op and shape."""
    op = crossing.producer
    target = op.properties.get("target") if isinstance(op, Computation) else None
    dims = ", ".join(d.data for d in tensor_type(crossing.value).dims)
    return f"the result [{dims}] of {target.data if target is not None else op.name}"  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
