"""Ops that depend on the positions of samples in the batch: they pick some samples, weight them by index,
reorder them, or move entries from one sample to another.

In a micro-batch other samples have these positions than in the whole batch, so none of this is separable,
though the shapes do not show it. Only dims that are exactly the samples are checked: rows of tokens may be
cut and moved within their samples.
"""

from __future__ import annotations

import sympy
from xdsl.ir import SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.loss_context import LossContext
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.value_states import BadState

_SAMPLE_SYMBOL = size_expr.size_symbol("B")
_COUNTING_OPS = frozenset({"arange", "linspace"})
_ORDERING_OPS = frozenset({"flip", "roll", "argsort", "sort"})
_PICKING_OPS = frozenset({"index", "index_select", "gather"})
_SPLITTING_OPS = frozenset({
    "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "split_copy",
    "split_with_sizes_copy",
})  # fmt: skip
_TRIANGLE_OPS = frozenset({"tril", "triu"})
_RESHAPING_OPS = frozenset({"view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias"})
_WEIGHING_OPS = frozenset({"mul", "add", "sub", "div", "pow"})


def find_misplaced(ctx: LossContext, op: Computation) -> BadState | None:
    """The bad state of an op that depends on positions of samples in the batch, None for any other op."""
    type, result = tensor_type(op.operands[0]), tensor_type(op.results[0])
    name = op.base_name
    if name == "slice":
        dim = get_argument(op, 1, "dim", 0) % max(len(type.dims), 1)
        if type.shape[dim] == _SAMPLE_SYMBOL != result.shape[dim]:
            return ctx.refuse_op(op, "picks some of the samples")
    if name in _SPLITTING_OPS:
        dim = get_argument(op, 2, "dim", 0) % max(len(type.dims), 1)
        if type.shape[dim] == _SAMPLE_SYMBOL and len(op.results) > 1:
            return ctx.refuse_op(op, "picks some of the samples")
    if name in {"diagonal", "diagonal_copy"}:
        dims = (get_argument(op, 2, "dim1", 0), get_argument(op, 3, "dim2", 1))
        if any(type.shape[d] == _SAMPLE_SYMBOL for d in dims):
            return ctx.refuse_op(op, "picks entries by the samples' places in the batch")
    if name in _RESHAPING_OPS and _redistributes_entries(type, result):
        return ctx.refuse_op(op, "gives each sample entries of the others")
    if result.is_floating and any(_is_triangle_of_samples(ctx, o) for o in op.operands):
        return ctx.refuse_op(op, "masks entries by the samples' places in the batch")
    if ctx.is_input_only(op.results[0]):
        return None
    if name in _PICKING_OPS and any(_made_by(ctx, o, _ORDERING_OPS) for o in op.operands[1:]):
        return ctx.refuse_op(op, "puts the samples in another order")
    if (
        name in _WEIGHING_OPS
        and result.is_floating
        and any(_made_by(ctx, o, _COUNTING_OPS | _ORDERING_OPS) for o in op.operands)
    ):
        return ctx.refuse_op(op, "reckons with the samples' places in the batch")
    return None


def _redistributes_entries(before: TensorType, after: TensorType) -> bool:
    """Whether the samples' dim has other entries in front of it than it had: they are no longer those of
    their samples."""
    if before.shape.count(_SAMPLE_SYMBOL) != 1 or after.shape.count(_SAMPLE_SYMBOL) != 1:
        return False
    front, back = (sympy.Mul(*t.shape[: t.shape.index(_SAMPLE_SYMBOL)]) for t in (before, after))
    return sympy.expand(front - back) != 0


def _made_by(ctx: LossContext, value: SSAValue, ops: frozenset[str]) -> bool:
    """Whether one of these ops along the samples made an input-only value, but for casts, views and
    numbers."""
    while ctx.is_input_only(value) and isinstance(value.owner, GlueOp):
        op = value.owner
        if op.base_name in ops:
            return _SAMPLE_SYMBOL in tensor_type(op.results[0]).shape and (
                op.base_name in _COUNTING_OPS or _along_samples(op)
            )
        if len(op.operands) != 1:
            return False
        value = op.operands[0]
    return False


def _is_triangle_of_samples(ctx: LossContext, value: SSAValue) -> bool:
    """Whether integers or booleans made from inputs come from a triangular mask with the samples along a
    side, as in causal attention with samples as positions."""
    seen, queue = {value}, [value]
    while queue:
        made = queue.pop()
        op, type = made.owner, tensor_type(made)
        if type.is_floating or not isinstance(op, GlueOp) or not ctx.is_input_only(made):
            continue
        if op.base_name in _TRIANGLE_OPS and _SAMPLE_SYMBOL in type.shape[-2:]:
            return True
        queue += [o for o in op.operands if o not in seen]
        seen.update(op.operands)
    return False


def _along_samples(op: GlueOp) -> bool:
    """Whether an op that orders entries does so along the samples."""
    dims = get_argument(
        op, 2 if op.base_name == "roll" else 1, "dims" if op.base_name in {"flip", "roll"} else "dim", -1
    )
    shape = tensor_type(op.results[0]).shape
    return any(
        shape[d] == _SAMPLE_SYMBOL
        for d in (dims if isinstance(dims, list | tuple) else [dims])
        if isinstance(d, int) and len(shape) > d
    )
