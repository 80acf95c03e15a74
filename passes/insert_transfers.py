"""`insert-transfers`: a `sec.transfer` for every value that crosses sections.

An edge carries one value to one section, by rows per sample, or whole between stages of a pipeline
(`secc.ir.analysis.transferable_values`). Micro-batches of two sections need not have the same pattern, so an
edge has one name in all cases (`secc.passes.boundaries.section_edges`), and samples of a case without it must
have no rows for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, IntAttr, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.ir import Attribute
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.analysis.transferable_values import WHOLE_TENSOR
from secc.ir.dialect.ops import TransferOp, graph_of, section_of
from secc.ir.dialect.typed_attributes import ExtentAttr
from secc.passes.boundaries.fallback_cases import drop_incompatible_fallbacks
from secc.passes.boundaries.section_edges import SectionEdge, ValueCrossing, build_edges, describe_crossing


@dataclass(frozen=True)
class InsertTransfers(ModulePass):
    name = "insert-transfers"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        drop_incompatible_fallbacks(graph)
        edges, problems = build_edges(graph)
        for crossing, reason in problems:
            _refuse_crossing(crossing, reason)
        for edge in reversed(edges):  # so that the transfers of one producer stand in order
            for crossing in edge.crossings:
                _insert_transfer(edge, crossing)


def _insert_transfer(edge: SectionEdge, crossing: ValueCrossing) -> None:
    """Put the transfer behind the value's producer, and let the consumer's section use its result."""
    properties: dict[str, Attribute] = {
        "sym": StringAttr(edge.name),
        "src": SymbolRefAttr(edge.src),
        "dst": SymbolRefAttr(edge.dst),
    }
    if edge.layout != WHOLE_TENSOR:
        properties |= {"dim": IntAttr(edge.layout.dim), "rows": StringAttr(edge.layout.rows)}
    if edge.layout.extents:
        properties["extents"] = ArrayAttr([ExtentAttr.of(extent) for extent in edge.layout.extents])
    transfer = TransferOp.create(operands=[crossing.value], result_types=[edge.type], properties=properties)
    transfer.result.name_hint = edge.name
    block = crossing.producer.parent_block()
    assert block is not None
    block.insert_op_after(transfer, crossing.producer)
    crossing.value.replace_uses_with_if(transfer.result, lambda use: section_of(use.operation) == edge.dst)


def _refuse_crossing(crossing: ValueCrossing, reason: str) -> None:
    raise UserError(
        f"{describe_crossing(crossing)} would go from section {crossing.src!r} to section "
        f"{crossing.dst!r}, but {reason}",
        crossing.where,
        f"put both into one section: `secc compile --section {crossing.dst}=PATH+PATH` with the "
        "module paths of their blocks",
    )
