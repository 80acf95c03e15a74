"""Statistics of the global batch in a loss, `--balance-loss global` and `--global-sums`.

A balance loss is a function g(S) of sums S over the tokens of the batch, one for each expert; other losses
take the root of a mean, or divide one sum by another (Dice over the batch). If a micro-batch computed g from
its own samples, the result would be another loss. Here each use of such a sum by an op that is not linear
gets, in place of the micro-batch's own sum s with coefficient c,

    c * S  +  c * (s - detach(s)) * B / b

for b of the global batch's B samples. Its value is that of the global batch, so g(S) is computed by every
micro-batch, and counts by its share b / B of the samples. Its gradient, times that share, is the
micro-batch's summand of the gradient of g(S). Values and gradients are those of plain PyTorch, for any g.

S has to be known before the first backward. A step therefore begins with a forward of all micro-batches that
only sums them (`secc.runtime.training.first_pass`): S is a term of its own, a vector, that is part of no
loss.
"""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.ir.dialect.argument_template import CallArguments, format_arguments
from secc.ir.dialect.ops import CallOp, Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.coefficient import UNIT_COEFFICIENT
from secc.passes.loss.gathered_rows import GATHER_TARGET
from secc.passes.loss.loss_context import STATISTIC_TARGET, WHOLE_BATCH_MODULE, LossContext
from secc.passes.loss.numerators import make_numerator
from secc.passes.loss.op_tables import ENTRYWISE_OPS, PICKING_OPS
from secc.passes.loss.value_states import (
    LOCAL_STATE,
    LocalState,
    ReadStatistic,
    StatisticUse,
    SumPart,
    ValueState,
)
from secc.runtime.plan.schema import SAMPLE_COUNT_SYMBOL

_MIXED_REMEDY = (
    "combine a sum over the batch with single samples only where it needs no gradient"
    " (`x - x.mean().detach()`), which would come from samples of other micro-batches; write a variance as a"
    f" function of means, `x.square().mean() - x.mean().square()`; or {WHOLE_BATCH_MODULE}"
)
_NO_STATISTIC_REMEDY = (
    "compute the balance loss in forward, from one row of the router's scores for each token, or accept it by"
    " micro-batches with --balance-loss micro-batch"
)


def name_statistic(statistic: ReadStatistic, name: str) -> None:
    """Names a statistic in the glue that reads it."""
    statistic.op.properties["args"] = StringAttr(f'$0, "{name}", {SAMPLE_COUNT_SYMBOL}')


def reads_statistics(value: SSAValue) -> bool:
    """Whether a value is computed from statistics of the global batch."""
    queue, seen = [value.owner], set[object]()
    while queue:
        op = queue.pop()
        if op in seen or not isinstance(op, Operation):
            continue
        if isinstance(op, GlueOp) and op.target.data == STATISTIC_TARGET:
            return True
        seen.add(op)
        queue += [operand.owner for operand in op.operands]
    return False


def count_passes_before(value: SSAValue, known: dict[Operation, int]) -> int:
    """Return the number of forwards of all micro-batches that must have run before a micro-batch computes a
    value as plain PyTorch does: the most values of the global batch that it reads one behind the other.
    known: numbers of ops that were counted before; new ones are added."""
    waiting = [value.owner]
    while waiting:
        op = waiting[-1]
        if op in known or not isinstance(op, Operation):
            waiting.pop()
        elif new := [o.owner for o in op.operands if isinstance(o.owner, Operation) and o.owner not in known]:
            waiting += new
        else:
            owners = [o.owner for o in op.operands if isinstance(o.owner, Operation)]
            is_read = isinstance(op, GlueOp) and op.target.data in (STATISTIC_TARGET, GATHER_TARGET)
            known[op] = max((known[o] for o in owners), default=0) + is_read
    return known[value.owner] if isinstance(value.owner, Operation) else 0


def is_function_of_sums(ctx: LossContext, op: Computation) -> bool:
    """Whether an op computes from sums over the batch, and what counts once for it, a value of the batch."""
    if isinstance(op, CallOp) or any(ctx.carries_samples(v) for v in (*op.operands, *op.results)):
        return False
    return all(
        isinstance(ctx.state_of(o), LocalState)
        or (bool(ctx.parts_of(o)) and not any(d.free_symbols for d in tensor_type(o).shape))
        for o in op.operands
    )


def reads_values_of_sums(ctx: LossContext, op: Computation) -> bool:
    """Whether an op computes rows of samples from sums over the batch that have no gradient (advantages less
    their mean over the batch): only the values of these sums matter then."""
    if not isinstance(op, GlueOp) or op.base_name not in ENTRYWISE_OPS | PICKING_OPS:
        return False
    sums = [o for o in op.operands if not isinstance(ctx.state_of(o), LocalState)]
    return all(
        bool(ctx.parts_of(o))
        and not tensor_type(o).requires_grad
        and not any(d.free_symbols for d in tensor_type(o).shape)
        for o in sums
    )


def use_batch_statistics(ctx: LossContext, op: Computation, why: str) -> ValueState:
    """Lets `op`, which is not linear, take sums over the global batch; returns the state of its result, which
    counts once for the batch. Bad where it mixes sums with single samples, or sums inside a block."""
    if not is_function_of_sums(ctx, op) and not reads_values_of_sums(ctx, op):
        some = ctx.statistic_use is StatisticUse.SEVERAL_NUMBERS
        return ctx.refuse_op(op, why, _NO_STATISTIC_REMEDY if some else _MIXED_REMEDY)
    for index, operand in enumerate(op.operands):
        if isinstance(ctx.state_of(operand), LocalState):
            continue
        type = tensor_type(operand)
        first, *others = [_read_part(ctx, op, part, type) for part in ctx.parts_of(operand) or ()]
        for value in others:
            first = ctx.pending.make_glue(op, "aten.add.Tensor", [first, value], "$0, $1", type)
        ctx.pending.commit_before(op, [first])
        op.operands[index] = first
    ctx.accepted.add(op)
    return LOCAL_STATE


def divide_sums(ctx: LossContext, op: Computation, above: SSAValue, below: SSAValue) -> SumPart:
    """The part of the loss that is one sum over the global batch divided by another, in place of `op`. above,
    below: the sums in a micro-batch."""
    type = tensor_type(above)
    sums = [_read_statistic(ctx, op, SumPart(UNIT_COEFFICIENT, v, True, op), type) for v in (above, below)]
    return SumPart(UNIT_COEFFICIENT, ctx.pending.make_glue(op, "aten.div.Tensor", sums, "$0, $1", type))


def _read_part(ctx: LossContext, op: Computation, part: SumPart, type: TensorType) -> SSAValue:
    """The batch's value of a part of an operand of `op` with `type`. A value that counts once for the batch
    is there already, and may come from other statistics, which the first pass does not know: only its
    coefficient is read."""
    if part.summed or part.atom is None:
        return _read_statistic(ctx, op, part, type)
    number = part.coefficient.constant
    if number is not None:
        return ctx.pending.make_glue(op, "aten.mul.Tensor", [part.atom], f"$0, {number!r}", type)
    weight = _read_statistic(ctx, op, SumPart(part.coefficient, origin=part.origin), type)
    return ctx.pending.make_glue(op, "aten.mul.Tensor", [part.atom, weight], "$0, $1", type)


def _read_statistic(ctx: LossContext, op: Computation, part: SumPart, type: TensorType) -> SSAValue:
    """The sum over the batch that a part is, in the form of an operand of `op` with `type`."""
    value, coefficient = make_numerator(ctx, part)
    if tensor_type(value).dtype != type.dtype:
        value = ctx.pending.make_glue(
            op,
            "aten._to_copy.default",
            [value],
            f"$0, dtype=torch.{type.torch_dtype}",
            TensorType.from_dims(tensor_type(value).shape, type.dtype.data),
        )
    args = f'$0, "", {SAMPLE_COUNT_SYMBOL}'
    read = ctx.pending.make_glue(op, STATISTIC_TARGET, [value], args, tensor_type(value))
    assert isinstance(read.owner, GlueOp)
    ctx.statistics.append(ReadStatistic(read.owner, part, value, coefficient))
    if tensor_type(read).shape == type.shape:
        return read
    sizes = format_arguments(CallArguments([list(type.shape)]))
    return ctx.pending.make_glue(op, "aten.expand.default", [read], f"$0, {sizes}", type)
