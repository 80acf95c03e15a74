"""Rules for reductions over samples: sums, means, and torch's losses with a `reduction` argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from xdsl.ir import SSAValue

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import Computation, ParamOp
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.loss.arithmetic import scaled
from secc.passes.loss.coefficient import ONE, Coefficient, of_number
from secc.passes.loss.label_counts import count
from secc.passes.loss.loss_context import Context
from secc.passes.loss.op_tables import ENTRY_LOSSES, REDUCTIONS, ROW_LOSSES
from secc.passes.loss.pending_ops import argument, with_argument
from secc.passes.loss.value_states import Bad, Local, Part, Stack, State, Sum

NONE, MEAN, SUM = 0, 1, 2


def reduced_dims(value: Any, rank: int) -> list[int]:
    """The dims that a `dim` argument names, counted from the front; all for none."""
    if value is None or value == []:
        return list(range(rank))
    dims = cast("list[int]", value if isinstance(value, list | tuple) else [value])
    return [d % rank for d in dims] if rank else []


def sum_or_mean(ctx: Context, op: Computation) -> State | None:
    """`sum` and `mean`, over all dims or some."""
    value = op.operands[0]
    type = tensor(value)
    dim_argument = None if op.callee.endswith(".default") else argument(op, 1, "dim")
    dims = reduced_dims(dim_argument, len(type.dims))
    mean = op.base == "mean"
    state = ctx.state(value)
    if isinstance(state, Stack):
        return _of_stack(state, mean)
    parts = ctx.parts(value)
    entries = ctx.entries(type, dims) if mean else ONE
    over_samples = bool(set(dims) & set(ctx.samples(type)))
    if parts is None or (state == Local() and not over_samples and not entries.size.free_symbols):
        return None
    if over_samples and ctx.carries(op.results[0]):
        return ctx.bad(op, "sums over one of several dims that carry samples")
    found: list[Part] = []
    for part in parts:
        if part.atom is not None:
            atom = _as_sum(ctx, op, part.atom) if mean else ctx.shop.rebuild(op, {0: part.atom})[0]
            summed = part.summed or over_samples
            part = Part(part.coefficient / entries, atom, summed, part.origin or (op if summed else None))
        found.append(part)
    local = isinstance(state, Local) and not over_samples
    return Local(tuple(found)) if local else Sum(tuple(found))


def _as_sum(ctx: Context, op: Computation, value: SSAValue) -> SSAValue:
    """The sum that a mean divides."""
    target = "aten.sum.default" if op.callee.endswith(".default") else "aten.sum.dim_IntList"
    operands = [value, *op.operands[1:]]
    return ctx.shop.glue(op, target, operands, argument_template.format(op.arguments), tensor(op.results[0]))


def _of_stack(stack: Stack, mean: bool) -> State:
    items = [i for i in stack.items if isinstance(i, Local | Sum)]
    share = ONE / cast(Coefficient, of_number(len(items))) if mean else ONE
    return Sum(tuple(p for i in items for p in cast(Sum, scaled(i, share)).parts))


def other_reduction(ctx: Context, op: Computation) -> State | None:
    """A reduction that is not linear: fine inside a sample, never over samples."""
    name = op.base
    type = tensor(op.operands[0])
    if len(op.operands) > 1 or not ctx.samples(type):
        return None  # max of two tensors is pointwise
    position, keyword = REDUCTIONS[name]
    over = set(reduced_dims(argument(op, position, keyword), len(type.dims))) & set(ctx.samples(type))
    return ctx.bad(op, "is taken over samples, and is not a sum over them") if over else None


def histogram(ctx: Context, op: Computation) -> State | None:
    """Counts and sums by class over samples: `histc` between fixed bounds, `scatter_add` and `index_add` into
    zeros."""
    if (
        not all(ctx.plain(o) for o in op.operands)
        or ctx.carries(op.results[0])
        or not any(ctx.carries(o) for o in op.operands)
    ):
        return None
    bounds = argument(op, 2, "min", 0), argument(op, 3, "max", 0)
    fixed = bounds[0] != bounds[1] if op.base == "histc" else ctx.literal(op.operands[0]) == 0
    return Sum((Part(ONE, op.results[0], True, op),)) if fixed else None


def loss(ctx: Context, op: Computation) -> State | None:
    """A loss of torch with a `reduction` argument: its sum form is the numerator, the number of entries (or
    rows) the divisor."""
    name = op.base
    rows = name in ROW_LOSSES
    position = ROW_LOSSES[name] if rows else ENTRY_LOSSES[name]
    reduction = argument(op, position, "reduction", MEAN)
    type = _broadcast([tensor(o) for o in op.operands[:2]]) if not rows else tensor(op.operands[0])
    if reduction == NONE or not ctx.samples(type) or not all(ctx.plain(o) for o in op.operands):
        return None
    atom = ctx.shop.rebuild(
        op, {}, None if reduction == SUM else with_argument(op, position, "reduction", SUM)
    )[0]
    divisor = ctx.entries(type, range(1 if rows else len(type.dims))) if reduction == MEAN else ONE
    return Sum((Part(ONE / divisor, atom, True, op),))


def label_loss(ctx: Context, op: Computation) -> State | Sequence[State] | None:
    """`nll_loss`: the negative log likelihood of labels, some ignored; the mean divides by the (weighted)
    number of the others."""
    type = tensor(op.operands[0])
    reduction = argument(op, 3, "reduction", MEAN)
    if not ctx.samples(type) or not all(ctx.plain(o) for o in op.operands):
        return None
    if ctx.samples(type)[0] == min(1, len(type.dims) - 1):
        return ctx.bad(op, "has samples as its classes")
    if reduction == NONE:
        return None
    atom = ctx.shop.rebuild(op, {}, None if reduction == SUM else with_argument(op, 3, "reduction", SUM))[0]
    number = count(ctx, op)
    total = Sum((Part(number),)) if number is not None else _unknown_count(ctx, op)
    if reduction == MEAN and number is None:
        return [total] * len(op.results)
    scale = ONE / number if number is not None and reduction == MEAN else ONE
    return [Sum((Part(scale, atom, True, op),)), total][: len(op.results)]


def _unknown_count(ctx: Context, op: Computation) -> Bad:
    if (
        len(op.operands) > 2
        and isinstance(op.operands[2].owner, ParamOp)
        and not ctx.input_only(op.operands[2])
    ):
        why = "divides by the sum of the labels' weights, which are a parameter of the model, or a buffer that a module may change"
        return ctx.bad(
            op,
            why,
            "register the weights as a buffer of a module without parameters, or make them in forward",
        )
    remedy = (
        "make the labels from inputs alone, or use reduction='sum' and divide by a number that inputs decide"
    )
    return ctx.bad(
        op, "divides by the number of labels that are not ignored, which depends on a block's result", remedy
    )


def _broadcast(types: list[TensorType]) -> TensorType:
    """The type of a pointwise op's result."""
    rank = max(len(t.dims) for t in types)
    dims = [[t.shape[d] for t in types if len(t.dims) >= -d] for d in range(-rank, 0)]
    shape = [next((size for size in sizes if size != 1), 1) for sizes in dims]
    return TensorType.of(shape, types[0].dtype.data)
