"""Rules for ops that mix entries along a dim, and the general rule by shapes for every op without an entry in
a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.dataflow import get_strings, is_random_op
from secc.ir.dialect.ops import CallOp, Computation, GlueOp, InputOp
from secc.ir.dialect.readable_names import (
    BATCH_INDEPENDENT_ATTRIBUTE,
    SAMPLE_PLACES_ATTRIBUTE,
    SUMMED_ATTRIBUTE,
)
from secc.ir.dialect.size_expr import Expr, evaluate_size, format_expr, size_symbol
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.loss.approximations import take_function_of_sums
from secc.passes.loss.arithmetic import apply_to_entries, apply_to_vector
from secc.passes.loss.batch_positions import find_misplaced
from secc.passes.loss.coefficient import UNIT_COEFFICIENT
from secc.passes.loss.loss_context import (
    DEFAULT_REMEDY,
    WHOLE_BATCH_MODULE,
    LossContext,
    has_one_entry,
)
from secc.passes.loss.op_tables import (
    ALONG_DIM_OPS,
    ATTENTION_OPS,
    BATCH_NORM_OPS,
    CONVOLUTION_OPS,
    FACTORY_OPS,
    SLIDING_OPS,
)
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.reductions import normalize_dims
from secc.passes.loss.value_states import (
    LOCAL_STATE,
    BadState,
    StatisticUse,
    SumPart,
    SumState,
    ValueState,
)
from secc.runtime.plan.schema import FUNCTION_PREFIX

BATCH_NORM_REMEDY = "use a norm without batch statistics (LayerNorm, GroupNorm), or put it in eval mode"
FREQUENCY_REMEDY = "leave scale_grad_by_freq out"
MIXED_ROWS_REMEDY = (
    "compute each sample's rows from that sample alone, the same way for any number of samples: name the dim "
    "that an op works along (`dim=-1`)"
)
STATE_REMEDY = (
    "each micro-batch would change what the next one reads: leave it as it is while the model trains, "
    "or change it after the step"
)

# What couples the samples of a batch inside a block, by kind of hazard: the cause in words, and the remedy.
COUPLINGS = {
    "batch_norm": ("batch norm in training mode", BATCH_NORM_REMEDY),
    "batch_statistics": ("a batch norm over the samples of the batch", BATCH_NORM_REMEDY),
    "frequency": (
        "gradients by how often a row is looked up in the batch, scale_grad_by_freq",
        FREQUENCY_REMEDY,
    ),
    "mixed_rows": ("a sample gives another result when other samples come with it", MIXED_ROWS_REMEDY),
    "state": ("a tensor of the model that forward changes depending on its inputs", STATE_REMEDY),
}

_MOST_PARTS = 20  # samples at which numbers of rows are compared

SOFTMAX_REMEDY = (
    "write this softmax of inputs as shares of a sum, which are exact: `e = x.exp()`, `e / e.sum(0)`; shift x"
    " in dataset() if its values are large"
)

_CUMSUM_REMEDY = (
    "sums of each sample's rows are exact with index_add: `place = torch.repeat_interleave(torch.arange("
    "len(lengths)), lengths)`, `h.new_zeros(len(lengths), h.shape[-1]).index_add(0, place, h)`; else let each"
    " sample have its own row of a padded tensor and sum along that"
)


def find_mixing(ctx: LossContext, op: Computation) -> BadState | None:
    """The bad state of an op that is known to make samples depend on each other, None for any other op."""
    name = op.base_name
    if not op.operands or (ctx.is_input_only(op.results[0]) and not tensor_type(op.results[0]).is_floating):
        return None  # positions and offsets that inputs give are bookkeeping
    if name in BATCH_NORM_OPS:
        return _check_batch_norm(ctx, op, BATCH_NORM_OPS[name])
    if (bad := find_misplaced(ctx, op)) is not None:
        return bad
    type = tensor_type(op.operands[0])
    samples, rank = set(ctx.sample_dims(type)), len(type.dims)
    if name in {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"}:
        shape = get_argument(op, 1, "normalized_shape", [])
        over = samples & set(range(rank - len(shape), rank))
        return ctx.refuse_op(op, "normalises over samples") if over else None
    if samples & _mixed_dims(name, rank):
        return ctx.refuse_op(op, "works along a dim that carries samples")
    if name == "constant_pad_nd" and samples & _padded_dims(get_argument(op, 1, "pad", []), rank):
        return ctx.refuse_op(op, "pads or cuts a dim that carries samples")
    if name in {"masked_scatter", "_unsafe_masked_index_put_accumulate"} and (
        why := _find_shared_rows(ctx, op)
    ):
        return ctx.refuse_op(op, why)
    if name in ATTENTION_OPS and _attends_over_samples(op):
        return ctx.refuse_op(op, "attends from sample to sample")
    if name not in ALONG_DIM_OPS:
        return None
    position, keyword, default = ALONG_DIM_OPS[name]
    dim = get_argument(op, position, keyword, default)
    dim = default if isinstance(dim, bool) else dim
    if not samples & set(normalize_dims(dim, rank)):
        return None
    why = "works along a dim that carries samples"
    if name in {"_softmax", "softmax"} and ctx.is_input_only(op.operands[0]):
        return ctx.refuse_op(op, why, SOFTMAX_REMEDY)
    if name == "cumsum" and rank > 1:
        return ctx.refuse_op(op, why, _CUMSUM_REMEDY)
    return ctx.refuse_op(op, why)


def find_mixing_by_numbers(ctx: LossContext, op: GlueOp) -> BadState | None:
    """The bad state of an op without an entry in a table that gives random samples other results when other
    samples come with them, None for any other op."""
    carrying = [r for r in op.results if ctx.carries_samples(r) and tensor_type(r).is_floating]
    if not carrying or is_random_op(op) or all(ctx.is_input_only(r) for r in carrying):
        return None
    if op.base_name in FACTORY_OPS:  # the entries of some are whatever the memory holds
        return None
    given = {d for o in op.operands for d in tensor_type(o).shape}
    if not all(d in given or _adds_up(ctx, d) for r in carrying for d in tensor_type(r).shape):
        return ctx.refuse_op(op, "makes a number of rows that micro-batches do not add up to")
    from secc.passes.loss.separability_probe import mixes_rows  # brings torch, which few cases need

    if not mixes_rows(op, ctx.sample_symbols):
        return None
    return ctx.refuse_op(op, "gives a sample another result when other samples come with it")


def _adds_up(ctx: LossContext, dim: Expr) -> bool:
    """Whether a dim has as many entries for two micro-batches together as for each alone. True where symbols
    other than one of samples decide it."""
    (symbol, *others) = [str(s) for s in dim.free_symbols] or [""]
    if symbol not in ctx.sample_symbols or others:
        return True
    sizes = [evaluate_size(dim, {symbol: n}) for n in range(_MOST_PARTS)]
    return all(sizes[m] + sizes[n] == sizes[m + n] for m, n in combinations(range(1, _MOST_PARTS // 2), 2))


def _find_uneven_result(op: CallOp) -> str:
    """The number of rows of a call's result that does not grow by as many for each further sample, as where
    samples are paired or put into groups; "" if there is none. Other rows may be so (patches in groups)."""
    samples = size_symbol("B")
    for dim in (d for r in op.results for d in tensor_type(r).shape if d.free_symbols == {samples}):
        sizes = [evaluate_size(dim, {"B": n}) for n in range(1, _MOST_PARTS)]
        if len({b - a for a, b in pairwise(sizes)}) > 1:
            return format_expr(dim)
    return ""


def _check_batch_norm(ctx: LossContext, op: Computation, position: int | None) -> BadState | None:
    training = position is None or get_argument(op, position, "training", False)
    type = tensor_type(op.operands[0])
    over = set(ctx.sample_dims(type)) - {1}
    if training and over:
        remedy = f"{BATCH_NORM_REMEDY}; or call it in a module with parameters, for --whole-batch MODULE"
        return ctx.refuse_op(op, "takes its mean and variance over the samples of the batch", remedy)
    return None


def _mixed_dims(name: str, rank: int) -> set[int]:
    """The dims of operand 0 along which an op combines entries, or tells them apart by their places."""
    if name in CONVOLUTION_OPS:
        return set(range(1, rank))
    if name in {"block_diag", "_pdist_forward"}:
        return set(range(rank))
    if name in {"tril", "triu"}:
        return set(range(max(rank - 2, 0), rank))
    sliding = SLIDING_OPS.fullmatch(name)
    return set(range(rank - int(sliding["dims"]), rank)) if sliding is not None else set()


def _padded_dims(pad: Sequence[object], rank: int) -> set[int]:
    """The dims that padding makes longer or shorter: pairs of (in front, behind) from the last dim on."""
    return {rank - 1 - i // 2 for i, size in enumerate(pad) if size != 0}


def _find_shared_rows(ctx: LossContext, op: Computation) -> str:
    """Why an op that moves entries to places which a mask of samples gives does not keep samples apart, "" if
    it does: entries that are the same for all batches are handed out in the order of the batch. Of none, such
    as the rows of a modality that no sample has, none are."""
    given, *_, source = op.operands
    if 0 in tensor_type(source).shape:
        return ""
    if not ctx.carries_samples(source):
        return "hands out entries that are not the samples' own, in the order of the batch"
    return "" if ctx.carries_samples(given) else "adds up entries of samples by their places"


def _attends_over_samples(op: Computation) -> bool:
    """Whether the samples are the positions of an attention. Rows of packed tokens may be, under a mask."""
    shapes = [tensor_type(o).shape for o in op.operands[:3]]
    return any(len(shape) > 1 and shape[-2] == size_symbol("B") for shape in shapes)


def is_summed_input(value: SSAValue) -> bool:
    """Whether a value is a number of the batch that adds up over its samples, as collate made it."""
    return isinstance(value.owner, InputOp) and SUMMED_ATTRIBUTE in value.owner.attributes


def states_of_call(ctx: LossContext, op: CallOp) -> list[ValueState]:
    """A block's call is exact on rows; an output without samples, computed from samples, is a reduction
    inside the block that nothing is known about."""
    path = op.target.data
    block, takes_all = ctx.graph.blocks[path], path in ctx.whole_batch
    if block.couples is not None and not takes_all:
        coupling = [
            p for p, b in ctx.graph.blocks.items() if b.couples is not None and p not in ctx.whole_batch
        ]
        offer = (
            f"; or {_format_whole_batch(path, coupling)}, exact: "
            f"{path if coupling == [path] else 'each'} then computes all samples of a step at once"
        )
        cause, remedy = COUPLINGS[block.couples.kind.data]
        place = f"{cause} ({block.couples.subject.data}) at {block.couples.where.data}"
        why = f"couples the samples of a batch: {place}"
        return [ctx.refuse_op(op, why, remedy + offer)] * len(op.results)
    for value in op.operands:
        # Code passes such a number on with other keywords, and nothing in the block reads it: numbers show.
        if not ctx.is_plain(value) and not is_summed_input(value):
            return [ctx.refuse_op(op, "takes a value that depends on all samples")] * len(op.results)
    if (misplaced := _find_misplaced_samples(ctx, op)) is not None:
        return [misplaced] * len(op.results)
    if not takes_all and (rows := _find_uneven_result(op)):
        why = f"returns {rows} rows for B samples, to which those of micro-batches do not add up"
        remedy = f"{DEFAULT_REMEDY}; or {_format_whole_batch(path, [])}, exact"
        return [ctx.refuse_op(op, why, remedy)] * len(op.results)
    why = "reduces its samples to a value that is the whole batch's"
    every = _format_whole_batch(path, _find_reducing_blocks(ctx, op))
    remedy = (
        "compute the loss outside the block, from outputs that have a row for each sample; or let a loop add"
        " up what each sample gives, and divide behind it, by sizes or a tensor of inputs (lengths.sum());"
        f" or {every}, exact: all samples of a step are then computed at once"
    )
    outs = [o.data for o in op.outs]
    # Scalars that numbers show to be sums over the samples (`secc.frontend.capture.summed_results`).
    sums: dict[str, ValueState] = {
        out: SumState((SumPart(UNIT_COEFFICIENT, r, True, op),))
        for out, r in zip(outs, op.results, strict=True)
        if out in get_strings(op, SUMMED_ATTRIBUTE) and not takes_all
    }
    mixed = [bad and out not in sums for out, bad in zip(outs, _reduced_results(ctx, op), strict=True)]
    if any(bad and _has_samples_elsewhere(ctx, op, i) for i, bad in enumerate(mixed)):
        why = "has results of one size in all drawn batches that take this path, so their samples are unknown"
        remedy = (
            "let dataset() show more samples of other sizes on this path early, or give more --stats-samples"
        )
        return [ctx.refuse_op(op, why, remedy)] * len(op.results)
    without_weights = not block.params.data and ctx.statistic_use is StatisticUse.NONE
    if takes_all or (without_weights and any(mixed)):
        ctx.reducing |= {path} if any(mixed) else set()
        return [LOCAL_STATE] * len(op.results)
    return [
        take_function_of_sums(ctx, op, why, remedy) if bad else sums.get(out, LOCAL_STATE)
        for bad, out in zip(mixed, outs, strict=True)
    ]


def _format_whole_batch(path: str, others: Iterable[str]) -> str:
    """The options that let a block and others like it take all samples of a step."""
    return " ".join(f"--whole-batch {p}" for p in dict.fromkeys([path, *others]))


def _reduced_results(ctx: LossContext, op: CallOp) -> list[bool]:
    """For each result of a block's call whether it has no samples though it is computed from some."""
    some, alone = any(map(ctx.carries_samples, op.operands)), get_strings(op, BATCH_INDEPENDENT_ATTRIBUTE)
    return [
        some and out.data not in alone and not ctx.carries_samples(r)
        for out, r in zip(op.outs, op.results, strict=True)
    ]


def _find_reducing_blocks(ctx: LossContext, op: CallOp) -> list[str]:
    """Returns the blocks with weights that, like `op`, reduce samples to one value in the same case."""
    block = op.parent_block()
    calls = [other for other in block.ops if isinstance(other, CallOp)] if block is not None else []
    return list(
        dict.fromkeys(
            call.target.data
            for call in calls
            if ctx.graph.blocks[call.target.data].params.data
            and call.target.data not in ctx.whole_batch
            and not get_strings(call, SUMMED_ATTRIBUTE)
            and any(_reduced_results(ctx, call))
        )
    )


def _has_samples_elsewhere(ctx: LossContext, op: CallOp, result: int) -> bool:
    """Whether the same result of the same block has rows of samples in another case, and as many dims."""
    rank = len(tensor_type(op.results[result]).shape)
    calls = (
        o for case in ctx.graph.cases for o in case.ops if isinstance(o, CallOp) and o.target == op.target
    )
    types = (tensor_type(o.results[result]) for o in calls if result < len(o.results))
    return any(len(kind.shape) == rank and ctx.sample_dims(kind) for kind in types)


def _find_misplaced_samples(ctx: LossContext, op: CallOp) -> BadState | None:
    """The bad state of a call of one of torch's own classes with samples at a dim of its first input where
    the class does not take them, such as the sequence of a recurrent layer."""
    places = get_strings(ctx.graph.blocks[op.target.data], SAMPLE_PLACES_ATTRIBUTE)
    if not places or not op.operands:
        return None
    type = tensor_type(op.operands[0])
    rank = len(type.dims)
    wrong = [d for d in ctx.sample_dims(type) if f"{rank} {d}" not in places]
    if not wrong:
        return None
    name = ctx.graph.blocks[op.target.data].cls.data
    return ctx.refuse_op(
        op,
        f"is a {name}, which mixes dim {wrong[0]} of an input of {rank} dims, and this dim carries samples",
        "give the samples at the dim where the class expects them (see its batch_first)",
    )


def states_of_other(ctx: LossContext, op: Computation) -> list[ValueState]:
    """The general rule: functions of coefficients are coefficients; rows stay rows."""
    if op.base_name in FACTORY_OPS:
        return [LOCAL_STATE] * len(op.results)
    if not all(ctx.is_plain(o) for o in op.operands):
        return _states_of_summed(ctx, op)
    return [_state_by_shape(ctx, op, r) for r in range(len(op.results))]


def _states_of_summed(ctx: LossContext, op: Computation) -> list[ValueState]:
    coefficient = ctx.apply_to_coefficients(op)
    if coefficient is not None:
        return [SumState((SumPart(coefficient),))]
    if (entries := apply_to_entries(ctx, op)) is not None:
        return [entries]
    if (computed := apply_to_vector(ctx, op)) is not None:
        return computed
    if all(
        ctx.is_input_only(r) and ctx.carries_samples(r) and not tensor_type(r).is_floating for r in op.results
    ):
        return [LOCAL_STATE] * len(op.results)
    name = find_sum_origin(ctx, op)
    why = f"is applied to a sum over samples{f' (made at {name})' if name else ''}, and is not linear"
    remedy = "apply it to each sample before the sum or mean, or leave it out of the loss"
    if any(ctx.carries_samples(r) for r in op.results):  # rows that a mean of the batch was taken from
        remedy += f"; or {WHOLE_BATCH_MODULE}"
    return [take_function_of_sums(ctx, op, why, remedy)] * len(op.results)


def find_sum_origin(ctx: LossContext, op: Operation) -> str:
    """The source line of the sum that `op` takes, "" where it is the op's own."""
    for value in op.operands:
        for part in ctx.parts_of(value) or ():
            where = part.origin.properties.get("where") if part.origin is not None else None
            if where is not None and where != op.properties.get("where"):
                return str(getattr(where, "data", ""))
    return ""


def _state_by_shape(ctx: LossContext, op: Computation, index: int) -> ValueState:
    result = op.results[index]
    over = any(ctx.carries_samples(o) for o in op.operands) and not ctx.carries_samples(result)
    is_empty = 0 in tensor_type(result).shape  # what a mask that is false for this pattern selects
    if over and not is_empty and not _is_byproduct(op, index):
        if str(index) in get_strings(op, SUMMED_ATTRIBUTE):  # numbers show a user's function to be one
            return SumState((SumPart(UNIT_COEFFICIENT, result, True, op),))
        return ctx.refuse_op(
            op, "makes one value of all samples, and is not a sum over them", _single_value_remedy(op)
        )
    return LOCAL_STATE


def _single_value_remedy(op: Computation) -> str:
    """What to do about an op with one value for all samples that is not a sum over them."""
    if isinstance(op, GlueOp) and op.target.data.startswith(FUNCTION_PREFIX):
        return "let it return a sum over the samples, or a row for each of them, and divide behind it"
    return DEFAULT_REMEDY


def find_pairing(ctx: LossContext, op: Computation, result: SSAValue) -> BadState | None:
    """The bad state of an op with a result that has more sample dims than its operands, as in-batch negatives
    have. Masks from inputs may be so."""
    most = max((len(ctx.sample_dims(tensor_type(o))) for o in op.operands), default=0)
    if len(ctx.sample_dims(tensor_type(result))) <= max(most, 1) or ctx.is_input_only(result):
        return None
    return ctx.refuse_op(op, "pairs every sample with every other")


def _is_byproduct(op: Computation, index: int) -> bool:
    """Whether a result is a by-product without entries or of no interest to autograd, such as a random
    state."""
    type = tensor_type(op.results[index])
    return index > 0 and not type.is_floating and (has_one_entry(type) or any(d == 0 for d in type.shape))
