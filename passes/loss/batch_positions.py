"""Ops that tell samples by their places in the batch: pick some, weigh them by number, put them in another
order, deal their entries out.

A micro-batch has other samples in these places than the whole batch, so none of this separates, though the
shapes say nothing of it. Only dims that are exactly the samples are looked at: rows of tokens may be cut and
moved within their samples.
"""

from __future__ import annotations

import sympy
from xdsl.ir import SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.loss.loss_context import Context, floating
from secc.passes.loss.pending_ops import argument
from secc.passes.loss.value_states import Bad

_SAMPLES = size_expr.symbol("B")
_COUNTING = frozenset({"arange", "linspace"})
_ORDERING = frozenset({"flip", "roll", "argsort", "sort"})
_PICKING = frozenset({"index", "index_select", "gather"})
_RESHAPING = frozenset({"view", "reshape", "_unsafe_view"})
_WEIGHING = frozenset({"mul", "add", "sub", "div", "pow"})


def misplaced(ctx: Context, op: Computation) -> Bad | None:
    """An op that takes samples by their places in the batch."""
    type, result = tensor(op.operands[0]), tensor(op.results[0])
    name = op.base
    if name == "slice":
        dim = argument(op, 1, "dim", 0) % max(len(type.dims), 1)
        if type.shape[dim] == _SAMPLES != result.shape[dim]:
            return ctx.bad(op, "picks some of the samples")
    if name in _RESHAPING and _dealt_out(type, result):
        return ctx.bad(op, "gives each sample entries of the others")
    if ctx.input_only(op.results[0]):
        return None
    if name in _PICKING and any(_made_by(ctx, o, _ORDERING) for o in op.operands[1:]):
        return ctx.bad(op, "puts the samples in another order")
    if (
        name in _WEIGHING
        and floating(result)
        and any(_made_by(ctx, o, _COUNTING | _ORDERING) for o in op.operands)
    ):
        return ctx.bad(op, "reckons with the samples' places in the batch")
    return None


def _dealt_out(before: TensorType, after: TensorType) -> bool:
    """Whether the samples' dim has other entries in front of it than it had: they are no longer those of
    their samples."""
    if before.shape.count(_SAMPLES) != 1 or after.shape.count(_SAMPLES) != 1:
        return False
    front, back = (sympy.Mul(*t.shape[: t.shape.index(_SAMPLES)]) for t in (before, after))
    return sympy.expand(front - back) != 0


def _made_by(ctx: Context, value: SSAValue, ops: frozenset[str]) -> bool:
    """Whether one of these ops along the samples made an input-only value, but for casts, views and
    numbers."""
    while ctx.input_only(value) and isinstance(value.owner, GlueOp):
        op = value.owner
        if op.base in ops:
            return _SAMPLES in tensor(op.results[0]).shape and (op.base in _COUNTING or _along_samples(op))
        if len(op.operands) != 1:
            return False
        value = op.operands[0]
    return False


def _along_samples(op: GlueOp) -> bool:
    """Whether an op that orders entries does so along the samples."""
    dims = argument(op, 2 if op.base == "roll" else 1, "dims" if op.base in {"flip", "roll"} else "dim", -1)
    shape = tensor(op.results[0]).shape
    return any(
        shape[d] == _SAMPLES
        for d in (dims if isinstance(dims, list | tuple) else [dims])
        if isinstance(d, int) and len(shape) > d
    )
