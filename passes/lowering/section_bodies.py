"""Extracts ops of a body from a case: one section's ops, a leaf of the loss, the coefficients of its terms.

The result is a list of clones. Values from other sections become `sec.receive`, values for them `sec.send`;
ops in no section are cloned wherever they are needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from xdsl.dialects.builtin import ArrayAttr, StringAttr, SymbolRefAttr
from xdsl.ir import Operation, SSAValue

from secc.errors import UserError
from secc.ir.analysis.dataflow import producer_of
from secc.ir.dialect.ops import (
    BodyOp,
    CaseOp,
    GuardOp,
    LeafOp,
    PlacedRowsOp,
    ReceiveOp,
    SendOp,
    SizeOp,
    TermOp,
    TransferOp,
    make_region,
    section_of,
)
from secc.ir.dialect.readable_names import DATA_SYMBOL_PREFIX
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.ir.text_io.module_text import print_module
from secc.ir.text_io.verifier import source_line

_DATA_SYMBOL = re.compile(rf"\b{DATA_SYMBOL_PREFIX}\d+\b")


def extract_section_ops(case: CaseOp, section: str, guards: Sequence[GuardOp]) -> list[Operation]:
    """The section's ops with its receives, sends and numerators of its terms, and `guards` with the ops that
    they read."""
    members = [op for op in case.ops if section_of(op) == section]
    needed = _collect_dependencies(members, lambda op: _is_received(op, section)) | _collect_dependencies(
        guards, lambda op: False
    )
    copy = _OpCopier()
    for op in case.ops:
        match op:
            case TransferOp() if op in needed:
                copy.add_receive(op.sym.data, op.result)
            case TransferOp() if op.src.root_reference.data == section:
                copy.add_send(op)
            case TermOp() if op in needed:
                copy.add_term(op, copy.values[op.numerator])
            case _ if op in needed:
                copy.add_clone(op)
            case _:
                pass
    return copy.ops


def extract_leaf_ops(case: CaseOp, name: str) -> list[Operation]:
    """The ops that compute a leaf, and the leaf; [] if the case does not have it."""
    found = [op for op in case.ops if isinstance(op, LeafOp) and op.sym.data == name]
    return _clone_needed(case, found)


def extract_coefficient_ops(cases: Sequence[CaseOp]) -> list[Operation]:
    """Each term of the cases of one pattern with only its coefficient, computed from the leaves' sums and
    sizes of the whole global batch. A term that several cases have has one coefficient in all of them."""
    copy, terms, leaves = _OpCopier(), set[str](), dict[str, SSAValue]()
    for case in cases:
        own = [op for op in case.ops if isinstance(op, TermOp) and op.sym.data not in terms]
        terms.update(op.sym.data for op in own)
        roots = [producer_of(op.coefficient) for op in own if op.coefficient is not None]
        needed = _collect_dependencies(roots, lambda op: isinstance(op, LeafOp))
        for op in case.ops:
            match op:
                case LeafOp() if op in needed and op.sym.data in leaves:
                    copy.values[op.result] = leaves[op.sym.data]
                case LeafOp() if op in needed:
                    copy.add_receive(op.sym.data, op.result)
                    leaves[op.sym.data] = copy.values[op.result]
                case TermOp() if op in own:
                    copy.add_term(
                        op, copy.add_constant_one() if op.coefficient is None else copy.values[op.coefficient]
                    )
                case _ if op in needed:
                    copy.add_clone(op)
                case _:
                    pass
    return copy.ops


def extract_guard_ops(case: CaseOp, guard: GuardOp) -> list[Operation]:
    """The ops that compute the value of a guard."""
    return _clone_needed(case, [producer_of(guard.value)])


def extract_placed_rows_ops(case: CaseOp, count: PlacedRowsOp) -> list[Operation]:
    """A condition on a sample's numbers of rows, and the ops that it needs."""
    return _clone_needed(case, [count])


def guards_before_section(case: CaseOp, section: str) -> list[GuardOp]:
    """The guards that can decide what a section does: those read before one of its ops was recorded."""
    ops = case.ops
    last = max((i for i, op in enumerate(ops) if section_of(op) == section), default=-1)
    return [op for op in ops[: last + 1] if isinstance(op, GuardOp)]


def make_body(name: str, section: str, when: Iterable[str], ops: Sequence[Operation]) -> BodyOp:
    """A `sec.body` with these ops."""
    properties = {
        "sym": StringAttr(name),
        "section": SymbolRefAttr(section),
        "when": ArrayAttr([StringAttr(k) for k in when]),
    }
    return BodyOp.create(properties=properties, regions=[make_region(ops)])


def canonical_text(ops: Sequence[Operation]) -> str:
    """A text that is equal for bodies that compute the same: without names of values and source lines.

    Symbols of sizes that inputs' values decide are numbered per case, so they are renumbered here.
    """
    for op in ops:
        op.properties.pop("where", None)
        for result in op.results:
            result.name_hint = None
    numbers: dict[str, str] = {}
    return _DATA_SYMBOL.sub(
        lambda m: numbers.setdefault(m.group(), f"{DATA_SYMBOL_PREFIX}{len(numbers)}"),
        print_module(make_body("", "", (), ops)),
    )


def _clone_needed(case: CaseOp, roots: Sequence[Operation]) -> list[Operation]:
    needed = _collect_dependencies(roots, lambda op: False)
    copy = _OpCopier()
    for op in case.ops:
        if op in needed:
            copy.add_clone(op)
    return copy.ops


def _collect_dependencies(roots: Iterable[Operation], last: Callable[[Operation], bool]) -> set[Operation]:
    """The roots and all ops that they depend on, not looking behind ops that are `last`."""
    found: set[Operation] = set()
    stack = list(roots)
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            operands = [op.numerator] if isinstance(op, TermOp) else op.operands
            stack += [] if last(op) else [producer_of(o) for o in operands]
    return found


def _is_received(op: Operation, section: str) -> bool:
    """Whether an op is a transfer into the section. Raises UserError for another section's op: no transfer
    stands in between."""
    if isinstance(op, TransferOp):
        return op.dst.root_reference.data == section
    if section_of(op) not in {None, section}:
        raise UserError(
            f"section {section!r} uses a value of section {section_of(op)!r} that no transfer carries",
            source_line(op),
            "run insert-transfers before lower",
        )
    return False


class _OpCopier:
    """Clones in the order of the case, and which of the new values stands for which of the case."""

    def __init__(self) -> None:
        self.ops: list[Operation] = []
        self.values: dict[SSAValue, SSAValue] = {}

    def add_clone(self, op: Operation) -> None:
        copy = op.clone(value_mapper=self.values)
        copy.properties.pop("section", None)
        self.ops.append(copy)

    def add_receive(self, name: str, value: SSAValue) -> None:
        copy = ReceiveOp.create_source(name, tensor_type(value))
        copy.result.name_hint = value.name_hint
        self.values[value] = copy.result
        self.ops.append(copy)

    def add_send(self, transfer: TransferOp) -> None:
        self.ops.append(
            SendOp.create(operands=[self.values[transfer.value]], properties={"edge": transfer.sym})
        )

    def add_term(self, term: TermOp, value: SSAValue) -> None:
        properties = {k: v for k, v in term.properties.items() if k != "section"}
        self.ops.append(TermOp.create(operands=[value], properties=properties, attributes=term.attributes))

    def add_constant_one(self) -> SSAValue:
        op = SizeOp.create(
            result_types=[TensorType.from_dims([], "f64")], properties={"value": StringAttr("1")}
        )
        self.ops.append(op)
        return op.result
