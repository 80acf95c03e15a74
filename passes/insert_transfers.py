"""`insert-transfers`: a `sec.transfer` for every value that crosses sections.

An edge carries one value to one section, by rows per sample, or whole between stages of a pipeline
(`secc.ir.analysis.transferable_values`). Micro-batches of two sections need not have the same pattern, so an
edge has one name in all cases (`secc.passes.boundaries.section_edges`). Where both sections work in a case
without it, samples of that case must have no rows for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, IntAttr, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.ir import Attribute
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.analysis.recorded_glue import FALLBACK_ATTRIBUTE
from secc.ir.analysis.row_order import RowOrder
from secc.ir.analysis.transferable_values import (
    WHOLE_TENSOR,
    NotTransferable,
    has_no_rows,
    row_layout,
)
from secc.ir.dialect.ops import (
    GraphOp,
    OutputOp,
    TransferOp,
    graph_of,
    section_of,
    strings_of,
)
from secc.ir.dialect.tensor_type import tensor_type
from secc.ir.dialect.typed_attributes import ExtentAttr
from secc.ir.text_io.verifier import source_line
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
        _lay_out_outputs(graph)


def _lay_out_outputs(graph: GraphOp) -> None:
    """Note where each sample's entries are in each tensor that `metrics()` asks for. Raises UserError for a
    tensor in which they cannot be."""
    known: dict[str, OutputOp] = {}
    for case in graph.cases:
        outputs = {op.sym.data: op for op in case.ops if isinstance(op, OutputOp)}
        mixed = RowOrder(graph, case).out_of_order if outputs else ()
        for name, op in outputs.items():
            kind = tensor_type(op.value)
            try:
                if op.value in mixed:
                    raise NotTransferable("its rows do not stand sample after sample")
                layout = row_layout(graph, kind)
            except NotTransferable as reason:
                raise _output_error(op, str(reason)) from None
            if tensor_type(known.setdefault(name, op).value) != kind:
                raise _output_error(op, "samples with other inputs have it in another shape or dtype")
            op.dim, op.rows = IntAttr(layout.dim), StringAttr(layout.rows)
            if layout.extents:
                op.extents = ArrayAttr([ExtentAttr.of(extent) for extent in layout.extents])
    for case in graph.cases:
        pattern = strings_of(case.when)
        absent = [key for key in strings_of(graph.optional) if key not in pattern]
        if FALLBACK_ATTRIBUTE in case.attributes:
            continue  # an evaluation refuses a micro-batch that takes it without the output
        having = {op.sym.data for op in case.ops if isinstance(op, OutputOp)}
        for op in (op for name, op in known.items() if name not in having):
            assert op.rows is not None
            if not has_no_rows(graph, op.rows.data, absent):
                raise _output_error(op, f"samples without {' and '.join(absent)} do not have it")


def _output_error(op: OutputOp, reason: str) -> UserError:
    return UserError(
        f"metrics() asks for {op.sym.data!r}, but {reason}",
        source_line(op),
        "return a tensor with one row, or a number of rows, for each sample",
    )


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
