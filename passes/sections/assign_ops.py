"""Puts the ops of every case into sections, once the blocks have theirs.

Glue goes to the section of its latest producer, so that data only ever flows from earlier to later sections.
Glue that depends on no block but reads parameters (an embedding lookup) goes where it is used first. Where an
edge cannot carry a result to a section that uses it, the consumer computes it from what an edge can carry;
glue is cheap. Input-only glue stays in no section.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.dataflow import (
    Origin,
    active,
    mode_of,
    origins,
    producer,
    strongest,
    users,
    with_gradient,
)
from secc.ir.analysis.recorded_glue import SPARE, label
from secc.ir.analysis.row_order import Order
from secc.ir.analysis.transferable_values import can_send
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    GlueOp,
    GraphOp,
    ParamOp,
    SectionOp,
    TermOp,
    section_of,
    set_section,
    strings,
)
from secc.ir.dialect.tensor_type import tensor


def place(graph: GraphOp) -> None:
    """Give every call, model-dependent glue and term its section, by the sections' order and blocks; then the
    sections their modes."""
    for case in graph.cases:
        _Placement(graph, case).run()
    for section in graph.sections:
        settle_mode(graph, section)


class _Placement:
    """One case's placement."""

    def __init__(self, graph: GraphOp, case: CaseOp) -> None:
        self.graph, self.case = graph, case
        self.sections = {s.sym.data: s for s in graph.sections}
        self.rank = {name: i for i, name in enumerate(self.sections)}
        self.home = {path: s.sym.data for s in graph.sections for path in strings(s.blocks)}
        self.origin, self.mixed = origins(case), Order(graph, case).mixed

    def run(self) -> None:
        for op in self.case.ops:
            if isinstance(op, CallOp):
                set_section(op, self.home[op.target.data])
            elif self._needs_section(op) and not self._at_users(op):
                set_section(op, self._latest(op))
        for op in reversed(self.case.ops):
            if isinstance(op, GlueOp) and self._needs_section(op):
                self._settle(op)

    def _needs_section(self, op: Operation) -> bool:
        return isinstance(op, TermOp) or (
            isinstance(op, GlueOp) and self.origin[op.results[0]] is Origin.MODEL
        )

    def _at_users(self, op: Operation) -> bool:
        """Whether an op belongs to its users' sections: of a spare case only blocks' results cross, which are
        the same in every case."""
        return SPARE in self.case.attributes and label(op) is not None

    def _latest(self, op: Operation) -> str | None:
        """The last section among the producers of an op; a term that depends on no block goes to the last
        active section."""
        operands = [op.numerator] if isinstance(op, TermOp) else op.operands
        sources = [s for o in operands if (s := section_of(producer(o))) is not None]
        if not sources and isinstance(op, TermOp):
            pattern = strings(self.case.when)
            sources = [name for name, s in self.sections.items() if active(strings(s.when), pattern)]
        return max(sources, key=lambda name: self.rank[name], default=None)

    def _settle(self, op: GlueOp) -> None:
        """Place glue by its uses where it has no section, and compute it at the consumer's where its result
        cannot be sent there."""
        used_in = {s for user in users(op) if (s := section_of(user)) is not None}
        home = section_of(op)
        if home is None:
            home = min(used_in, key=lambda name: self.rank[name], default=None)
            set_section(op, home)
        stays = self._at_users(op)
        stuck = sorted(
            (s for s in used_in - {home} if stays or not self._can_send(op, home, s)),
            key=lambda name: self.rank[name],
        )
        if stuck and home not in used_in:
            set_section(op, stuck.pop(0))
        for name in stuck:
            repeat(op, name)

    def _can_send(self, op: GlueOp, src: str | None, dst: str) -> bool:
        used = [r for r in op.results if any(section_of(u.operation) == dst for u in r.uses)]
        ends = self.sections[src or dst], self.sections[dst]
        return src is not None and all(can_send(self.graph, tensor(r), *ends, r in self.mixed) for r in used)


def repeat(op: Operation, section: str) -> None:
    """Compute `op` once more, for its uses in `section`."""
    copy = op.clone()
    set_section(copy, section)
    block = op.parent_block()
    assert block is not None
    block.insert_op_after(copy, op)
    for old, new in zip(op.results, copy.results, strict=True):
        old.replace_uses_with_if(new, lambda use: section_of(use.operation) == section)


def settle_mode(graph: GraphOp, section: SectionOp) -> None:
    """The mode that a section's ops need: gradients of parameters, of received tensors only, or none."""
    cases = [(case, [op for op in case.ops if section_of(op) == section.sym.data]) for case in graph.cases]
    section.mode = StringAttr(
        strongest(mode for case, ops in cases if ops for mode in modes(ops, with_gradient(case)))
    )


def modes(ops: Iterable[Operation], wanted: Collection[SSAValue]) -> set[str]:
    """The modes that ops need, of whose results and operands gradients reach those `wanted`."""
    return {_mode(op, wanted) for op in ops}


def _mode(op: Operation, wanted: Collection[SSAValue]) -> str:
    if isinstance(op, CallOp):
        return mode_of(op)
    if not any(r in wanted for r in op.results):
        return "forward"
    return "train" if any(isinstance(producer(o), ParamOp) and o in wanted for o in op.operands) else "dgrad"
