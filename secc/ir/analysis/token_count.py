"""Counts the tokens of a micro-batch: entries of its texts, padding included."""

from __future__ import annotations

from secc.ir.dialect.ops import GraphOp, KeyOp
from secc.ir.dialect.size_expr import format_expr, symbol_names
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.model.default_collate import TEXT_KEY


def token_count(graph: GraphOp) -> str:
    """Returns the number of entries of `input_ids`, or else of the labels, of a micro-batch as an expression
    over its symbols; "" if there is neither, or a sample has one label."""
    keys = {op.key.data: op for op in graph.body.block.ops if isinstance(op, KeyOp)}
    samples = next(iter(graph.symbols), "")
    for name in (TEXT_KEY, graph.labels.data if graph.labels else ""):
        dims = tensor_type(keys[name].result).shape if name in keys else ()
        if any(symbol_names(dim) - {samples} for dim in dims):
            return "*".join(f"({format_expr(dim)})" for dim in dims)
    return ""
