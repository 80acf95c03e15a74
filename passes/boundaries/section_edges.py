"""The edges between sections: which values cross, and which crossings of different cases are one edge with
one readable name.

Crossings of different cases are one edge if they have the same ends and type and the same producer (the block
or op, at its place in the user's code), or else the same consumer: text alone goes into the decoder where a
text with its image goes in the next case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xdsl.ir import Operation, OpResult, SSAValue

from secc.ir.analysis.dataflow import active, producer, text_of, with_gradient
from secc.ir.analysis.random_ops import site
from secc.ir.analysis.row_order import Order
from secc.ir.analysis.transferable_values import WHOLE, Carry, NotCarriable, carry_between, vanishes
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, GraphOp, ParamOp, section_of, strings
from secc.ir.dialect.readable_names import identifier, tail, unique
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.ir.text_io.verifier import where

Problem = tuple["Crossing", str]
Place = tuple[
    str, str, int, int
]  # target, file:line and lines that lead there, how many alike came before, index of result or operand


@dataclass(frozen=True, eq=False)
class Crossing:
    """A value of one case, made in section `src` and used in section `dst`."""

    case: CaseOp
    value: OpResult
    src: str
    dst: str
    made: Place
    used: frozenset[Place]
    grad: bool  # whether a gradient of the loss comes back
    mixed: bool  # whether its rows are out of order

    @property
    def producer(self) -> Operation:
        return self.value.owner

    @property
    def where(self) -> str:
        return where(self.producer)


@dataclass
class Edge:
    """Crossings, at most one for each case, that are one edge."""

    name: str
    src: str
    dst: str
    type: TensorType  # with a gradient if it takes one in any case
    carry: Carry
    crossings: list[Crossing] = field(default_factory=list[Crossing])

    def fits(self, crossing: Crossing) -> bool:
        """Whether a crossing of another case could be this edge."""
        ends = (crossing.src, crossing.dst) == (self.src, self.dst)
        kind = tensor(crossing.value)
        alike = (kind.dims, kind.dtype) == (self.type.dims, self.type.dtype)
        return ends and alike and all(c.case is not crossing.case for c in self.crossings)


def crossings(graph: GraphOp, case: CaseOp) -> list[Crossing]:
    """The values that cross sections in a case, each once for each section that uses it, in the order of the
    case."""
    at, wanted, mixed = places(case), with_gradient(case), Order(graph, case).mixed
    found: list[Crossing] = []
    for op in case.ops:
        src = section_of(op)
        for result in op.results if src is not None else ():
            uses = sorted(result.uses, key=lambda u: (at[u.operation], u.index))
            ends = dict.fromkeys(end for u in uses if (end := section_of(u.operation)) not in {None, src})
            for dst in ends:
                used = frozenset((*at[u.operation], u.index) for u in uses if section_of(u.operation) == dst)
                found.append(
                    Crossing(
                        case,
                        result,
                        str(src),
                        str(dst),
                        (*at[op], result.index),
                        used,
                        result in wanted,
                        result in mixed,
                    )
                )
    return found


def places(case: CaseOp) -> dict[Operation, tuple[str, str, int]]:
    """The identity of each op across cases: its section and target, its place in the user's code, its number
    among those alike."""
    seen: dict[tuple[str, str], int] = {}
    found: dict[Operation, tuple[str, str, int]] = {}
    for op in case.ops:
        target = text_of(op, "target") or text_of(op, "sym")
        key = (f"{section_of(op)} {op.name} {target}", f"{where(op)} {site(op)}")
        found[op] = (*key, seen.get(key, 0))
        seen[key] = seen.get(key, 0) + 1
    return found


def edges_of(graph: GraphOp) -> tuple[list[Edge], list[Problem]]:
    """The edges of all cases, and the crossings that cannot be edges, each with the reason."""
    builder = _Builder(graph)
    for case in graph.cases:
        builder.add(crossings(graph, case))
    builder.problems += [p for edge in builder.edges if (p := _missing_somewhere(graph, edge))]
    return builder.edges, builder.problems


def _missing_somewhere(graph: GraphOp, edge: Edge) -> Problem | None:
    """Where both sections are active but a case lacks the edge, its samples must have no rows: micro-batches
    of two sections mix cases."""
    sections = {s.sym.data: strings(s.when) for s in graph.sections}
    having = {id(c.case) for c in edge.crossings}
    for case in graph.cases:
        pattern = strings(case.when)
        absent = [key for key in strings(graph.optional) if key not in pattern]
        both = edge.carry != WHOLE and all(active(sections[end], pattern) for end in (edge.src, edge.dst))
        if both and id(case) not in having and not vanishes(graph, edge.carry.rows, absent):
            return edge.crossings[
                0
            ], f"case {case.sym.data!r} computes without it, and a sample of that case would have rows of it"
    return None


class _Builder:
    """Collects the crossings of one case after the other into edges."""

    def __init__(self, graph: GraphOp) -> None:
        self.graph = graph
        self.sections = {s.sym.data: s for s in graph.sections}
        self.edges: list[Edge] = []
        self.problems: list[Problem] = []

    def add(self, found: list[Crossing]) -> None:
        left = [c for c in found if not self._join(c, lambda a, b: a.made == b.made)]
        for crossing in left:
            if not self._join(crossing, lambda a, b: bool(a.used & b.used)):
                self._open(crossing)

    def _join(self, crossing: Crossing, alike: Callable[[Crossing, Crossing], bool]) -> bool:
        for edge in self.edges:
            if edge.fits(crossing) and any(alike(crossing, other) for other in edge.crossings):
                edge.crossings.append(crossing)
                edge.type = _with_grad(edge.type, edge.type.requires_grad or crossing.grad)
                return True
        return False

    def _open(self, crossing: Crossing) -> None:
        kind = tensor(crossing.value)
        try:
            how = carry_between(
                self.graph, kind, self.sections[crossing.src], self.sections[crossing.dst], crossing.mixed
            )
        except NotCarriable as reason:
            self.problems.append((crossing, str(reason)))
        else:
            kind = _with_grad(kind, crossing.grad)
            self.edges.append(Edge(self._name(crossing), crossing.src, crossing.dst, kind, how, [crossing]))

    def _name(self, crossing: Crossing) -> str:
        taken = [e.name for e in self.edges]
        base = edge_label(self.graph, crossing.value)
        return base if base not in taken else unique(f"{base}_to_{crossing.dst}", taken)


def _with_grad(kind: TensorType, grad: bool) -> TensorType:
    return TensorType.of([d.data for d in kind.dims], kind.dtype.data, grad)


def edge_label(graph: GraphOp, value: SSAValue) -> str:
    """A name for a value: the block that it comes from, with the path of the output; for glue the nearest
    block or parameter."""
    for op in _upstream(value):
        if isinstance(op, CallOp):
            short = tail(op.target.data, list(graph.blocks))
            index = next((i for i, r in enumerate(op.results) if r is value), None)
            output = "" if index is None else strings(op.outs)[index].strip('.[]"0')
            return identifier(f"{short}_{output}" if output else short)
        if isinstance(op, ParamOp):
            return identifier(op.path.data.removesuffix(".weight"))
    return "value"


def _upstream(value: SSAValue) -> Iterator[Operation]:
    """The ops that a value comes from, nearest first."""
    queue, seen = [producer(value)], set[Operation]()
    while queue:
        op = queue.pop(0)
        if op not in seen:
            seen.add(op)
            yield op
            queue += [producer(o) for o in op.operands]


def label(crossing: Crossing) -> str:
    """A crossing's value for messages: its op and shape."""
    op = crossing.producer
    target = op.properties.get("target") if isinstance(op, Computation) else None
    dims = ", ".join(d.data for d in tensor(crossing.value).dims)
    return f"the result [{dims}] of {target.data if target is not None else op.name}"  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
