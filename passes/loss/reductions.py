"""Rules for reductions over samples: sums, means, and torch's losses with a `reduction` argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from xdsl.ir import SSAValue

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import Computation, ParamOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.approximations import GLOBAL_SUMS_OFFER
from secc.passes.loss.arithmetic import apply_to_vector, scale_state
from secc.passes.loss.batch_statistics import divide_sums
from secc.passes.loss.coefficient import UNIT_COEFFICIENT, Coefficient, coefficient_of_number
from secc.passes.loss.label_counts import (
    check_block_labels,
    count_labels,
    count_unignored,
    sum_counted_labels,
)
from secc.passes.loss.loss_context import DEFAULT_REMEDY, LossContext, is_rerecorded
from secc.passes.loss.op_tables import (
    ADDITIVE_REDUCTIONS,
    ENTRY_LOSSES,
    REDUCTION_MEAN,
    REDUCTION_NONE,
    REDUCTION_OPS,
    REDUCTION_SUM,
    ROW_LOSSES,
)
from secc.passes.loss.pending_ops import format_with_argument, get_argument
from secc.passes.loss.picked_entries import states_of_weighted_labels
from secc.passes.loss.value_states import (
    BadState,
    LocalState,
    StackState,
    StatisticUse,
    SumPart,
    SumState,
    ValueState,
)

_VARIANCE_REMEDY = (
    "write it as a function of means, `x.square().mean() - x.mean().square()`, and compile with --global-sums"
)


def normalize_dims(value: Any, rank: int) -> list[int]:
    """The dims that a `dim` argument names, counted from the front; all dims for None or []."""
    if value is None or value == []:
        return list(range(rank))
    dims = cast("list[int]", value if isinstance(value, list | tuple) else [value])
    return [d % rank for d in dims] if rank else []


def state_of_sum_or_mean(ctx: LossContext, op: Computation) -> ValueState | None:
    """`sum` and `mean`, over all dims or some. None where the general rule applies."""
    value = op.operands[0]
    type = tensor_type(value)
    dim_argument = None if op.callee.endswith(".default") else get_argument(op, 1, "dim")
    dims = normalize_dims(dim_argument, len(type.dims))
    mean = op.base_name == "mean"
    if not mean and (number := count_unignored(ctx, op)) is not None:
        return SumState((SumPart(number),))
    state = ctx.state_of(value)
    if isinstance(state, StackState):
        return _reduce_stack(state, mean)
    parts = ctx.parts_of(value)
    entries = ctx.entry_count(type, dims) if mean else UNIT_COEFFICIENT
    over_samples = bool(set(dims) & set(ctx.sample_dims(type)))
    if parts is None or (state == LocalState() and not over_samples and not entries.size.free_symbols):
        return None
    if over_samples and ctx.carries_samples(op.results[0]):
        return ctx.refuse_op(op, "sums over one of several dims that carry samples")
    found: list[SumPart] = []
    for part in parts:
        if part.atom is not None:
            atom = _mean_as_sum(ctx, op, part.atom) if mean else ctx.pending.rebuild_op(op, {0: part.atom})[0]
            summed = part.summed or over_samples
            part = SumPart(part.coefficient / entries, atom, summed, part.origin or (op if summed else None))
        found.append(part)
    local = isinstance(state, LocalState) and not over_samples
    return LocalState(tuple(found)) if local else SumState(tuple(found))


def _mean_as_sum(ctx: LossContext, op: Computation, value: SSAValue) -> SSAValue:
    """The sum that a mean divides."""
    target = "aten.sum.default" if op.callee.endswith(".default") else "aten.sum.dim_IntList"
    operands = [value, *op.operands[1:]]
    return ctx.pending.make_glue(
        op, target, operands, argument_template.format_arguments(op.arguments), tensor_type(op.results[0])
    )


def _reduce_stack(stack: StackState, mean: bool) -> ValueState:
    items = [i for i in stack.items if isinstance(i, LocalState | SumState)]
    share = (
        UNIT_COEFFICIENT / cast(Coefficient, coefficient_of_number(len(items))) if mean else UNIT_COEFFICIENT
    )
    return SumState(tuple(p for i in items for p in cast(SumState, scale_state(i, share)).parts))


def state_of_other_reduction(ctx: LossContext, op: Computation) -> ValueState | Sequence[ValueState] | None:
    """A reduction that is not linear: allowed inside a sample; over samples it is bad, or a sum of a function
    of each entry."""
    name = op.base_name
    type = tensor_type(op.operands[0])
    if (computed := apply_to_vector(ctx, op)) is not None:
        return computed
    if len(op.operands) > 1 or not ctx.sample_dims(type):
        return None  # max of two tensors is pointwise
    position, keyword = REDUCTION_OPS[name]
    over = set(normalize_dims(get_argument(op, position, keyword), len(type.dims))) & set(
        ctx.sample_dims(type)
    )
    if not over:
        return None
    if _adds_up(op) and ctx.is_plain(op.operands[0]) and not ctx.carries_samples(op.results[0]):
        return SumState((SumPart(UNIT_COEFFICIENT, op.results[0], True, op),))
    remedy = _VARIANCE_REMEDY if name in ("var", "var_mean", "std", "std_mean") else DEFAULT_REMEDY
    return ctx.refuse_op(op, "is taken over samples, and is not a sum over them", remedy)


def _adds_up(op: Computation) -> bool:
    """Whether a reduction is a sum: of entries that are numbers, of entries that are not 0, of magnitudes."""
    is_norm = op.base_name in ("norm", "linalg_vector_norm")
    return op.base_name in ADDITIVE_REDUCTIONS or (is_norm and get_argument(op, 1, "ord", 2) in (0, 1))


def state_of_histogram(ctx: LossContext, op: Computation) -> ValueState | None:
    """Counts and sums by class over samples: `histc` between fixed bounds, `bincount` of a least length,
    `scatter_add` and `index_add` into zeros."""
    if (
        not all(ctx.is_plain(o) for o in op.operands)
        or ctx.carries_samples(op.results[0])
        or not any(ctx.carries_samples(o) for o in op.operands)
    ):
        return None
    if op.base_name == "histc":
        fixed = get_argument(op, 2, "min", 0) != get_argument(op, 3, "max", 0)
    elif op.base_name == "bincount":
        fixed = get_argument(op, 2, "minlength", 0) > 0
    else:
        fixed = ctx.literal_value(op.operands[0]) == 0
    return SumState((SumPart(UNIT_COEFFICIENT, op.results[0], True, op),)) if fixed else None


def state_of_loss(ctx: LossContext, op: Computation) -> ValueState | None:
    """A loss of torch with a `reduction` argument: its sum form is the numerator, the number of entries (or
    rows) the divisor."""
    name = op.base_name
    rows = name in ROW_LOSSES
    position = ROW_LOSSES[name] if rows else ENTRY_LOSSES[name]
    reduction = get_argument(op, position, "reduction", REDUCTION_MEAN)
    type = (
        _broadcast_type([tensor_type(o) for o in op.operands[:2]])
        if not rows
        else tensor_type(op.operands[0])
    )
    if (
        reduction == REDUCTION_NONE
        or not ctx.sample_dims(type)
        or not all(ctx.is_plain(o) for o in op.operands)
    ):
        return None
    atom = ctx.pending.rebuild_op(
        op,
        {},
        None
        if reduction == REDUCTION_SUM
        else format_with_argument(op, position, "reduction", REDUCTION_SUM),
    )[0]
    divisor = (
        ctx.entry_count(type, range(1 if rows else len(type.dims)))
        if reduction == REDUCTION_MEAN
        else UNIT_COEFFICIENT
    )
    return SumState((SumPart(UNIT_COEFFICIENT / divisor, atom, True, op),))


def states_of_label_loss(ctx: LossContext, op: Computation) -> ValueState | Sequence[ValueState] | None:
    """`nll_loss`: the negative log-likelihood of labels, some ignored; the mean divides by the (weighted)
    number of the others."""
    type = tensor_type(op.operands[0])
    reduction = get_argument(op, 3, "reduction", REDUCTION_MEAN)
    if ctx.sample_dims(type) and len(op.operands) > 2 and not ctx.is_plain(op.operands[2]):
        return states_of_weighted_labels(ctx, op)
    if not ctx.sample_dims(type) or not all(ctx.is_plain(o) for o in op.operands):
        return None
    if ctx.sample_dims(type)[0] == min(1, len(type.dims) - 1):
        return ctx.refuse_op(op, "has samples as its classes")
    if reduction == REDUCTION_NONE:
        return None
    atom = ctx.pending.rebuild_op(
        op,
        {},
        None if reduction == REDUCTION_SUM else format_with_argument(op, 3, "reduction", REDUCTION_SUM),
    )[0]
    number = count_labels(ctx, op)
    if reduction == REDUCTION_MEAN and number is None and ctx.statistic_use is StatisticUse.ALL:
        quotient = SumState((divide_sums(ctx, op, atom, sum_counted_labels(ctx, op)),))
        return [quotient, _refuse_unknown_count(ctx, op)][: len(op.results)]
    total = SumState((SumPart(number),)) if number is not None else _refuse_unknown_count(ctx, op)
    if reduction == REDUCTION_MEAN and number is None:
        return [total] * len(op.results)
    scale = (
        UNIT_COEFFICIENT / number if number is not None and reduction == REDUCTION_MEAN else UNIT_COEFFICIENT
    )
    parts = [SumPart(scale, atom, True, op)]
    if reduction == REDUCTION_MEAN:
        parts += check_block_labels(ctx, op)
    return [SumState(tuple(parts)), total][: len(op.results)]


def _refuse_unknown_count(ctx: LossContext, op: Computation) -> BadState:
    if (
        len(op.operands) > 2
        and isinstance(op.operands[2].owner, ParamOp)
        and not ctx.is_input_only(op.operands[2])
    ):
        why = (
            "divides by the sum of the labels' weights, which are a parameter of the model, or a "
            "buffer that a module may change"
        )
        return ctx.refuse_op(
            op,
            why,
            "register the weights as a buffer of a module without parameters, or make them in forward"
            + GLOBAL_SUMS_OFFER,
        )
    remedy = (
        "make the labels from inputs alone, or use reduction='sum' and divide by a number that inputs decide"
    )
    cause = "ops that Python chooses by the inputs" if is_rerecorded(op.operands[1]) else "a block's result"
    return ctx.refuse_op(
        op,
        f"divides by the number of labels that are not ignored, which depends on {cause}",
        remedy + GLOBAL_SUMS_OFFER,
    )


def _broadcast_type(types: list[TensorType]) -> TensorType:
    """The type of a pointwise op's result."""
    rank = max(len(t.dims) for t in types)
    dims = [[t.shape[d] for t in types if len(t.dims) >= -d] for d in range(-rank, 0)]
    shape = [next((size for size in sizes if size != 1), 1) for sizes in dims]
    return TensorType.from_dims(shape, types[0].dtype.data)
