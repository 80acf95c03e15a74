"""Assigns the ops of every case to sections, once the blocks have theirs.

Glue goes to the section of its latest producer, so that data only flows from earlier to later sections. Glue
that depends on no block but reads parameters (an embedding lookup) goes where it is used first. Where an edge
cannot carry a result to a section that uses it, the consumer computes it again from values that an edge can
carry; glue is cheap. Input-only glue stays in no section.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.dataflow import (
    ValueOrigin,
    call_mode,
    classify_origins,
    find_gradient_values,
    producer_of,
    strongest_mode,
    users_of,
)
from secc.ir.analysis.recorded_glue import FALLBACK_ATTRIBUTE, recorded_label
from secc.ir.analysis.row_order import RowOrder
from secc.ir.analysis.transferable_values import can_transfer
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    GlueOp,
    GraphOp,
    OutputOp,
    ParamOp,
    SectionOp,
    TermOp,
    section_of,
    set_section,
    strings_of,
)
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.plan.sample_predicates import is_active


def assign_sections(graph: GraphOp) -> None:
    """Gives every call, model-dependent glue and term its section, by the sections' order and blocks; then
    the sections their modes."""
    for case in graph.cases:
        _CaseAssignment(graph, case).assign_case()
    for section in graph.sections:
        update_section_mode(graph, section)


class _CaseAssignment:
    """One case's placement."""

    def __init__(self, graph: GraphOp, case: CaseOp) -> None:
        self.graph, self.case = graph, case
        self.sections = {s.sym.data: s for s in graph.sections}
        self.rank = {name: i for i, name in enumerate(self.sections)}
        self.home = {path: s.sym.data for s in graph.sections for path in strings_of(s.blocks)}
        self.origin, self.mixed = classify_origins(case), RowOrder(graph, case).out_of_order

    def assign_case(self) -> None:
        # First from producers to users: glue follows its latest producer. Then from users to producers: glue
        # without a section gets its users', and glue that cannot be sent is copied to them. In this order
        # an op's users have their sections, copies included, before the op is settled.
        for op in self.case.ops:
            if isinstance(op, CallOp):
                set_section(op, self.home[op.target.data])
            elif self._needs_section(op) and not self._belongs_to_users(op):
                set_section(op, self._latest_producer_section(op))
        for op in reversed(self.case.ops):
            if isinstance(op, GlueOp) and self._needs_section(op):
                self._settle_by_uses(op)

    def _needs_section(self, op: Operation) -> bool:
        return isinstance(op, TermOp | OutputOp) or (
            isinstance(op, GlueOp) and self.origin[op.results[0]] is ValueOrigin.MODEL
        )

    def _belongs_to_users(self, op: Operation) -> bool:
        """Whether an op belongs to its users' sections: of a spare case only blocks' results cross, which are
        the same in every case."""
        return FALLBACK_ATTRIBUTE in self.case.attributes and recorded_label(op) is not None

    def _latest_producer_section(self, op: Operation) -> str | None:
        """The last section among the producers of an op; a term or an output that depends on no block goes to
        the last active section."""
        operands = [op.numerator] if isinstance(op, TermOp) else op.operands
        sources = [s for o in operands if (s := section_of(producer_of(o))) is not None]
        if not sources and isinstance(op, TermOp | OutputOp):
            pattern = strings_of(self.case.when)
            sources = [name for name, s in self.sections.items() if is_active(strings_of(s.when), pattern)]
        return max(sources, key=lambda name: self.rank[name], default=None)

    def _settle_by_uses(self, op: GlueOp) -> None:
        """Place glue by its uses where it has no section, and compute it at the consumer's where its result
        cannot be sent there."""
        used_in = {s for user in users_of(op) if (s := section_of(user)) is not None}
        home = section_of(op)
        if home is None:
            home = min(used_in, key=lambda name: self.rank[name], default=None)
            set_section(op, home)
        stays = self._belongs_to_users(op)
        stuck = sorted(
            (s for s in used_in - {home} if stays or not self._can_transfer(op, home, s)),
            key=lambda name: self.rank[name],
        )
        # Not used where it is: the op itself moves to the first of these, and only the others get copies.
        if stuck and home not in used_in:
            set_section(op, stuck.pop(0))
        for name in stuck:
            duplicate_op(op, name)

    def _can_transfer(self, op: GlueOp, src: str | None, dst: str) -> bool:
        used = [r for r in op.results if any(section_of(u.operation) == dst for u in r.uses)]
        ends = self.sections[src or dst], self.sections[dst]
        return src is not None and all(
            can_transfer(self.graph, tensor_type(r), *ends, r in self.mixed) for r in used
        )


def duplicate_op(op: Operation, section: str) -> None:
    """Computes `op` a second time, for its uses in `section`."""
    copy = op.clone()
    set_section(copy, section)
    block = op.parent_block()
    assert block is not None
    block.insert_op_after(copy, op)
    for old, new in zip(op.results, copy.results, strict=True):
        old.replace_uses_with_if(new, lambda use: section_of(use.operation) == section)


def update_section_mode(graph: GraphOp, section: SectionOp) -> None:
    """Sets the mode that a section's ops need: gradients of parameters, of received tensors only, or none."""
    cases = [(case, [op for op in case.ops if section_of(op) == section.sym.data]) for case in graph.cases]
    section.mode = StringAttr(
        strongest_mode(
            mode for case, ops in cases if ops for mode in required_modes(ops, find_gradient_values(case))
        )
    )


def required_modes(ops: Iterable[Operation], wanted: Collection[SSAValue]) -> set[str]:
    """The modes that ops need, if `wanted` are the values that a gradient of the loss reaches."""
    return {_required_mode(op, wanted) for op in ops}


def _required_mode(op: Operation, wanted: Collection[SSAValue]) -> str:
    if isinstance(op, CallOp):
        return call_mode(op)
    if not any(r in wanted for r in op.results):
        return "forward"
    return (
        "train" if any(isinstance(producer_of(o), ParamOp) and o in wanted for o in op.operands) else "dgrad"
    )
