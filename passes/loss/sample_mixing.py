"""Rules for ops that mix along a dim, and the rule for every op that no table knows: its shapes decide."""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.dataflow import texts_of
from secc.ir.dialect.ops import CallOp, Computation
from secc.ir.dialect.readable_names import ALONE
from secc.ir.dialect.tensor_type import tensor
from secc.passes.loss.approximations import balance
from secc.passes.loss.batch_positions import misplaced
from secc.passes.loss.loss_context import Context, floating, one_entry
from secc.passes.loss.op_tables import ALONG_DIM, BATCH_NORMS, FACTORIES
from secc.passes.loss.pending_ops import argument
from secc.passes.loss.reductions import reduced_dims
from secc.passes.loss.value_states import LOCAL, Bad, Part, State, Sum

NO_BATCH_STATISTICS = "use a norm without batch statistics (LayerNorm, GroupNorm), or put it in eval mode"
NO_FREQUENCY = "leave scale_grad_by_freq out"
NO_STATE = "each micro-batch would change what the next one reads: leave it as it is while the model trains, or change it after the step"


def mixing(ctx: Context, op: Computation) -> Bad | None:
    """A known op that makes each sample depend on others."""
    name = op.base
    if not op.operands or (ctx.input_only(op.results[0]) and not floating(tensor(op.results[0]))):
        return None  # positions and offsets that inputs give are bookkeeping
    if name in BATCH_NORMS:
        return _batch_norm(ctx, op, BATCH_NORMS[name])
    if (bad := misplaced(ctx, op)) is not None:
        return bad
    type = tensor(op.operands[0])
    samples, rank = set(ctx.samples(type)), len(type.dims)
    if name in {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"}:
        shape = argument(op, 1, "normalized_shape", [])
        over = samples & set(range(rank - len(shape), rank))
        return ctx.bad(op, "normalises over samples") if over else None
    if name not in ALONG_DIM:
        return None
    position, keyword, default = ALONG_DIM[name]
    dim = argument(op, position, keyword, default)
    dim = default if isinstance(dim, bool) else dim
    return (
        ctx.bad(op, "works along a dim that carries samples")
        if samples & set(reduced_dims(dim, rank))
        else None
    )


def _batch_norm(ctx: Context, op: Computation, position: int | None) -> Bad | None:
    training = position is None or argument(op, position, "training", False)
    type = tensor(op.operands[0])
    over = set(ctx.samples(type)) - {1}
    if training and over:
        return ctx.bad(op, "takes its mean and variance over the samples of the batch", NO_BATCH_STATISTICS)
    return None


def call(ctx: Context, op: CallOp) -> list[State]:
    """A block's call: exact on rows; an output without samples, made of samples, is a reduction that nobody
    can look into."""
    block = ctx.graph.blocks[op.target.data]
    if block.couples is not None:
        remedies = {"batch norm": NO_BATCH_STATISTICS, "gradients": NO_FREQUENCY, "a tensor": NO_STATE}
        remedy = next(
            (text for start, text in remedies.items() if block.couples.data.startswith(start)),
            NO_BATCH_STATISTICS,
        )
        return [ctx.bad(op, f"couples the samples of a batch: {block.couples.data}", remedy)] * len(
            op.results
        )
    for value in op.operands:
        if not ctx.plain(value):
            return [ctx.bad(op, "takes a value that depends on all samples")] * len(op.results)
    some = any(ctx.carries(o) for o in op.operands)
    why = "reduces its samples to a value that is the whole batch's"
    remedy = "compute the loss outside the block, from outputs that have a row for each sample"
    alone, outs = texts_of(op, ALONE), [o.data for o in op.outs]
    mixed = (
        some and out not in alone and not ctx.carries(r) for out, r in zip(outs, op.results, strict=True)
    )
    return [balance(ctx, op, why, remedy) if bad else LOCAL for bad in mixed]


def other(ctx: Context, op: Computation) -> list[State]:
    """The rule for every other op: functions of coefficients are coefficients; rows stay rows."""
    if op.base in FACTORIES:
        return [LOCAL] * len(op.results)
    if not all(ctx.plain(o) for o in op.operands):
        return _not_plain(ctx, op)
    return [_by_shape(ctx, op, r) for r in range(len(op.results))]


def _not_plain(ctx: Context, op: Computation) -> list[State]:
    coefficient = ctx.applied(op)
    if coefficient is not None:
        return [Sum((Part(coefficient),))]
    if all(ctx.input_only(r) and ctx.carries(r) and not floating(tensor(r)) for r in op.results):
        return [LOCAL] * len(op.results)
    name = origin(ctx, op)
    why = f"is applied to a sum over samples{f' (made at {name})' if name else ''}, and is not linear"
    return [
        balance(ctx, op, why, "apply it to each sample before the sum or mean, or leave it out of the loss")
    ] * len(op.results)


def origin(ctx: Context, op: Operation) -> str:
    """Where the sum that `op` takes was made."""
    for value in op.operands:
        for part in ctx.parts(value) or ():
            where = part.origin.properties.get("where") if part.origin is not None else None
            if where is not None and where != op.properties.get("where"):
                return str(getattr(where, "data", ""))
    return ""


def _by_shape(ctx: Context, op: Computation, index: int) -> State:
    over = any(ctx.carries(o) for o in op.operands) and not ctx.carries(op.results[index])
    if over and not _empty(op, index):
        return ctx.bad(op, "makes one value of all samples, and is not a sum over them")
    return LOCAL


def pairing(ctx: Context, op: Computation, result: SSAValue) -> Bad | None:
    """An op whose result has more dims that carry samples than its operands: in-batch negatives. Masks made
    of inputs may be so."""
    most = max((len(ctx.samples(tensor(o))) for o in op.operands), default=0)
    if len(ctx.samples(tensor(result))) <= max(most, 1) or ctx.input_only(result):
        return None
    return ctx.bad(op, "pairs every sample with every other")


def _empty(op: Computation, index: int) -> bool:
    """Whether a result is a by-product without entries or of no interest to autograd, such as a random
    state."""
    type = tensor(op.results[index])
    return index > 0 and not floating(type) and (one_entry(type) or any(d == 0 for d in type.shape))
