"""Ops that put rows of samples in places that a mask gives, in the order of the batch, or that select rows by
a mask.

Captures show such a number of rows as an expression of sizes, because it was equal for all samples that were
drawn. A later sample with fewer places than rows moves the rows of all samples behind it, and
`masked_scatter` says nothing. So each sample's own numbers are compared before it is trained.
"""

from __future__ import annotations

import sympy
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.errors import UserError
from secc.ir.analysis.recorded_glue import recorded_label
from secc.ir.dialect.ops import Computation, GlueOp, PlacedRowsOp, ReturnOp
from secc.ir.dialect.size_expr import Expr, format_expr, size_symbol
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.loss.buffer_constants import copy_for_leaf
from secc.passes.loss.loss_context import COUNT_TYPE, LossContext
from secc.passes.loss.loss_walk import ops_behind

_SCATTERS = frozenset({"masked_scatter", "masked_scatter_"})
_PUTS = frozenset({"index_put", "index_put_", "_unsafe_index_put"})
_SELECTIONS = frozenset({"index", "masked_select", "nonzero"})
_SAME_ENTRIES = frozenset({
    "expand", "reshape", "view", "_unsafe_view", "_to_copy", "clone", "contiguous", "alias", "repeat",
    "unsqueeze", "squeeze", "flatten", "expand_copy", "view_copy",
})  # fmt: skip


def find_placed_rows(ctx: LossContext) -> list[PlacedRowsOp]:
    """The conditions on each sample's numbers of rows under which the case keeps samples apart, each once.
    Ops that they need wait in `ctx.pending`."""
    found: dict[tuple[SSAValue, str], PlacedRowsOp] = {}
    end = ctx.case.ops[-1]
    assert isinstance(end, ReturnOp)
    needed = ops_behind(end.operands[0])
    for op in ctx.case.ops:
        if op not in needed or not isinstance(op, GlueOp) or recorded_label(op) is not None:
            continue
        if (pair := _places_and_rows(ctx, op)) is None:
            continue
        mask, rows = pair
        if not ctx.is_input_only(mask) or _is_rerecorded(mask):
            continue
        mask, per_row = _drop_expansions(mask)
        key, rows = (mask, str(rows)), rows / per_row
        if key not in found and (count := _make_count(ctx, op, mask, rows)) is not None:
            found[key] = count
    return list(found.values())


def _places_and_rows(ctx: LossContext, op: GlueOp) -> tuple[SSAValue, Expr] | None:
    """The mask of an op, and the number of its true entries if all rows find their places. None for other
    ops, and for rows that are equal for all samples."""
    name, type = op.base_name, tensor_type(op.operands[0]) if op.operands else None
    if type is None:
        return None
    if name in _SCATTERS and len(op.operands) == 3:
        given, mask, source = op.operands
        if _is_shared(ctx, source):
            return None
        spread = sympy.Mul(*tensor_type(given).shape) / sympy.Mul(*tensor_type(mask).shape)
        return mask, sympy.Mul(*tensor_type(source).shape) / spread
    masks = [o for o in op.operands[1:] if tensor_type(o).dtype.data == "bool"]
    if name in _PUTS and len(masks) == 1 and len(op.operands) == 3:
        values, rank = tensor_type(op.operands[2]), len(tensor_type(masks[0]).dims)
        whole = len(values.dims) == 1 + len(type.dims) - rank
        return (masks[0], values.shape[0]) if whole and values.shape[0] != 1 else None
    if name in _SELECTIONS and type.dtype.data == "bool" and name == "nonzero":
        return op.operands[0], tensor_type(op.results[0]).shape[0]
    if name in _SELECTIONS and len(masks) == 1 and len(op.operands) == 2:
        arguments = op.arguments.get(1, "indices", None) if name == "index" else None
        before = next((i for i, a in enumerate(arguments or []) if a is not None), 0)
        return masks[0], tensor_type(op.results[0]).shape[before]
    return None


def _is_shared(ctx: LossContext, value: SSAValue) -> bool:
    """Whether a value repeats entries that are the same for all samples, such as the embedding of a masked
    token."""
    while ctx.carries_samples(value):
        op = value.owner
        if not isinstance(op, GlueOp) or op.base_name not in _SAME_ENTRIES:
            return False
        value = op.operands[0]
    return True


def _is_rerecorded(value: SSAValue) -> bool:
    return any(recorded_label(op) is not None for op in ops_behind(value))


def _drop_expansions(mask: SSAValue) -> tuple[SSAValue, Expr]:
    """A mask without repeated entries, and how often each is repeated: one comparison of tokens instead of
    one for each entry of their embeddings."""
    repeated: Expr = sympy.Integer(1)
    while isinstance(op := mask.owner, GlueOp) and op.base_name in {"expand", "unsqueeze", "clone"}:
        inner = op.operands[0]
        repeated *= sympy.Mul(*tensor_type(mask).shape) / sympy.Mul(*tensor_type(inner).shape)
        mask = inner
    return mask, repeated


def _make_count(ctx: LossContext, op: Computation, mask: SSAValue, rows: Expr) -> PlacedRowsOp | None:
    """The condition that a mask has as many places as `rows` says. None where rows do not add up over
    samples: if a width decides their number, the mask was true everywhere, which a guard holds."""
    names = sorted(str(s) for s in rows.free_symbols)
    if len(names) != 1 or names[0] not in ctx.sample_symbols:
        return None
    symbol = size_symbol(names[0])
    if (rows / symbol).free_symbols:
        return None
    counts = [ctx.pending.make_glue(op, "aten.sum.default", [mask], "$0", COUNT_TYPE)]
    if names[0] in ctx.data_symbols:
        try:
            selected = ctx.selected_row_count(names[0])
        except UserError:
            return None
        if not ctx.is_input_only(selected) or _is_rerecorded(selected) or _counts_mask(selected, mask):
            return None
        counts.append(selected)
        rows = rows / symbol
    inherited = {k: v for k, v in op.properties.items() if k == "where"}
    return ctx.pending.add_op(
        PlacedRowsOp.create(
            operands=[copy_for_leaf(ctx.pending, c) for c in counts],
            properties={"what": StringAttr(op.callee), "rows": StringAttr(format_expr(rows))} | inherited,
        )
    )


def _counts_mask(count: SSAValue, mask: SSAValue) -> bool:
    """Whether rows that one mask selects return to the places of the same mask."""
    op = count.owner
    return isinstance(op, Operation) and bool(op.operands) and _drop_expansions(op.operands[0])[0] is mask
