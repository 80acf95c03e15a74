"""Ops that put rows of samples in places that a mask gives, in the order of the batch.

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
from secc.passes.loss.loss_context import COUNT_TYPE, LossContext, is_rerecorded
from secc.passes.loss.loss_walk import ops_behind

_SCATTERS = frozenset({"masked_scatter", "masked_scatter_"})
_PUTS = frozenset({"index_put", "index_put_", "_unsafe_index_put"})
_SELECTIONS = frozenset({"masked_select", "nonzero"})  # by values: captures need not show their sizes
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
        if (placed := _places_and_rows(ctx, op)) is None:
            continue
        mask, source, rows = placed
        if not ctx.is_input_only(mask) or is_rerecorded(mask):
            continue
        mask, per_row = _drop_expansions(mask)
        key, rows = (mask, str(rows)), rows / per_row
        if key not in found and (count := _make_count(ctx, op, mask, source, rows)) is not None:
            found[key] = count
    return list(found.values())


def _places_and_rows(ctx: LossContext, op: GlueOp) -> tuple[SSAValue, SSAValue, Expr] | None:
    """The mask of an op, what is put in its places, and the number of places if all of it finds one. None for
    other ops, and for rows that are equal for all samples."""
    if len(op.operands) != 3:
        return None
    given, mask, source = op.operands
    shape, places, rows = (tensor_type(o).shape for o in op.operands)
    if op.base_name in _SCATTERS and not _is_shared(ctx, source):
        return mask, source, sympy.Mul(*rows) / (sympy.Mul(*shape) / sympy.Mul(*places))
    by_mask = op.base_name in _PUTS and tensor_type(mask).dtype.data == "bool"
    if by_mask and len(rows) == 1 + len(tensor_type(given).dims) - len(places) and rows[0] != 1:
        return mask, source, rows[0]
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


def _drop_expansions(mask: SSAValue) -> tuple[SSAValue, Expr]:
    """A mask without repeated entries, and how often each is repeated: one comparison of tokens instead of
    one for each entry of their embeddings."""
    repeated: Expr = sympy.Integer(1)
    while isinstance(op := mask.owner, GlueOp) and op.base_name in {"expand", "unsqueeze", "clone"}:
        inner = op.operands[0]
        repeated *= sympy.Mul(*tensor_type(mask).shape) / sympy.Mul(*tensor_type(inner).shape)
        mask = inner
    return mask, repeated


def _make_count(
    ctx: LossContext, op: Computation, mask: SSAValue, source: SSAValue, rows: Expr
) -> PlacedRowsOp | None:
    """The condition that a mask has as many places as `rows` says. None where rows do not add up over
    samples, and where it is not known how many there are."""
    counts = [ctx.pending.make_glue(op, "aten.sum.default", [mask], "$0", COUNT_TYPE)]
    names = sorted(str(s) for s in rows.free_symbols)
    if len(names) != 1 or names[0] not in ctx.sample_symbols:
        return None
    size: Expr = size_symbol(names[0])
    if names[0] in ctx.data_symbols:
        try:
            counts.append(ctx.selected_row_count(names[0]))
        except UserError:
            return None
    elif (selected := _find_selection(source)) is not None:
        size, chosen = selected
        counts.append(ctx.pending.make_glue(op, "aten.sum.default", [chosen], "$0", COUNT_TYPE))
    elif any(map(_selects_by_values, ops_behind(source))):
        return None
    if (rows / size).free_symbols:
        return None
    if len(counts) == 2:
        if not ctx.is_input_only(counts[1]) or is_rerecorded(counts[1]) or _counts_mask(counts[1], mask):
            return None
        rows = rows / size
    inherited = {k: v for k, v in op.properties.items() if k == "where"}
    return ctx.pending.add_op(
        PlacedRowsOp.create(
            operands=[copy_for_leaf(ctx.pending, c) for c in counts],
            properties={"what": StringAttr(op.callee), "rows": StringAttr(format_expr(rows))} | inherited,
        )
    )


def _find_selection(source: SSAValue) -> tuple[Expr, SSAValue] | None:
    """The number of rows that a mask has selected from something, as captures show it, and the mask; None
    where `source` is something else."""
    while isinstance(op := source.owner, GlueOp) and op.base_name in _SAME_ENTRIES:
        source = op.operands[0]
    if not isinstance(op, GlueOp) or op.base_name != "index" or len(op.operands) != 2:
        return None
    mask = op.operands[1]
    before = next((i for i, a in enumerate(op.arguments.get(1, "indices", [])) if a is not None), 0)
    return (tensor_type(source).shape[before], mask) if tensor_type(mask).dtype.data == "bool" else None


def _selects_by_values(op: Operation) -> bool:
    if not isinstance(op, GlueOp):
        return False
    by_mask = op.base_name == "index" and any(tensor_type(o).dtype.data == "bool" for o in op.operands[1:])
    return by_mask or op.base_name in _SELECTIONS


def _counts_mask(count: SSAValue, mask: SSAValue) -> bool:
    """Whether rows that one mask selects return to the places of the same mask."""
    op = count.owner
    return isinstance(op, Operation) and bool(op.operands) and _drop_expansions(op.operands[0])[0] is mask
