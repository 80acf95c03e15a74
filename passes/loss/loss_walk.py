"""Follows one case from inputs to the loss: each op's rule gives the states of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xdsl.ir import Operation, SSAValue

from secc.errors import UserError
from secc.ir.analysis import recorded_glue
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, ConstOp, GlueOp, GraphOp, InputOp, ReturnOp
from secc.ir.dialect.tensor_type import tensor_type
from secc.passes.loss import arithmetic, linear_ops, reductions
from secc.passes.loss.coefficient import UNIT_COEFFICIENT, Coefficient
from secc.passes.loss.gathered_rows import compute_on_gathered, offer_names, states_on_gathered
from secc.passes.loss.loss_context import STATISTIC_TARGET, LossContext, has_one_entry
from secc.passes.loss.op_tables import (
    ENTRY_LOSSES,
    LABEL_LOSSES,
    LINEAR_OPS,
    PRODUCT_OPS,
    REDUCTION_OPS,
    ROW_LOSSES,
)
from secc.passes.loss.picked_entries import apply_to_picked
from secc.passes.loss.sample_mixing import (
    find_mixing,
    find_mixing_by_numbers,
    find_pairing,
    is_summed_input,
    states_of_call,
    states_of_other,
)
from secc.passes.loss.value_states import (
    LOCAL_STATE,
    BadState,
    LocalState,
    StatisticUse,
    SumPart,
    SumState,
    ValueState,
)
from secc.runtime.plan.schema import LOOP_LABEL_PREFIX

LossRule = Callable[[LossContext, Computation], "ValueState | Sequence[ValueState] | None"]

STATE_RULES: dict[str, LossRule] = (
    dict.fromkeys(LINEAR_OPS, linear_ops.state_of_linear)
    | dict.fromkeys(REDUCTION_OPS, reductions.state_of_other_reduction)
    | dict.fromkeys(PRODUCT_OPS, linear_ops.state_of_contraction)
    | dict.fromkeys([*ENTRY_LOSSES, *ROW_LOSSES], reductions.state_of_loss)
    | dict.fromkeys(LABEL_LOSSES, reductions.states_of_label_loss)
    | dict.fromkeys(["_to_copy", "to", "float", "double"], linear_ops.state_of_cast)
    | dict.fromkeys(["add", "sub", "rsub"], arithmetic.state_of_addition)
    | dict.fromkeys(["sum", "mean"], reductions.state_of_sum_or_mean)
    | dict.fromkeys(["histc", "bincount", "scatter_add", "index_add"], reductions.state_of_histogram)
    | dict.fromkeys(["stack", "cat"], linear_ops.state_of_stack)
    | dict.fromkeys(
        ["full", "scalar_tensor", "fill", "zeros", "ones", "new_zeros", "new_ones", "new_full"],
        linear_ops.state_of_filled,
    )
    | dict.fromkeys(["zeros_like", "ones_like", "full_like"], linear_ops.state_of_filled)
    | {
        "mul": arithmetic.state_of_product,
        "div": arithmetic.state_of_quotient,
        "where": linear_ops.state_of_where,
        "masked_fill": linear_ops.state_of_masked_fill,
    }
)


def walk_loss(
    graph: GraphOp,
    case: CaseOp,
    accept: Collection[str] = (),
    statistics: StatisticUse = StatisticUse.NONE,
    gather: Collection[str] = (),
    whole_batch: Collection[str] = (),
) -> tuple[LossContext, ValueState]:
    """Facts about a case and the state of its loss; `accept` names the approximations that may be taken.
    statistics: which sums over the global batch ops may read. gather: blocks with rows that ops may read of
    all its samples.
    whole_batch: blocks that take all samples of a step at once."""
    context = LossContext(graph, case, accept, statistics, gather, whole_batch=whole_batch)
    end = case.ops[-1]
    assert isinstance(end, ReturnOp)
    _walk_ops(context, ops_behind(end.operands[0]))
    state = context.state_of(end.operands[0])
    return context, _offer_names(context, state) if isinstance(state, BadState) else state


def _offer_names(context: LossContext, bad: BadState) -> BadState:
    """The bad state of a loss, with a remedy if rows of all samples of some blocks would make it good."""
    copy = context.case.clone()
    trial = LossContext(
        context.graph,
        copy,
        context.accept,
        context.statistic_use,
        context.gather,
        collects_names=True,
        whole_batch=context.whole_batch,
    )
    try:
        _walk_ops(trial, ops_behind(copy.ops[-1].operands[0]))
    except UserError:
        return bad
    return offer_names(trial, trial.state_of(copy.ops[-1].operands[0])) or bad


def walk_logged(context: LossContext, value: SSAValue) -> ValueState:
    """The state of a logged scalar. Ops that the loss does not need are followed here; none of them makes
    secc refuse the model."""
    try:
        _walk_ops(context, ops_behind(value))
    except UserError as error:
        assert isinstance(value.owner, Operation)
        return BadState(error.message, value.owner, error.remedy or "")
    return context.state_of(value)


def _walk_ops(context: LossContext, needed: set[Operation]) -> None:
    for op in context.case.ops:
        if op.results and op.results[0] in context.states:
            continue
        if op in needed and isinstance(op, Computation):
            context.states.update(zip(op.results, _result_states(context, op), strict=True))
        elif (
            isinstance(op, ConstOp)
            and (number := context.literal_value(op.result)) is not None
            and is_scalar(op.result)
        ):
            context.states[op.result] = LocalState((SumPart(Coefficient(number=number)),))
        elif isinstance(op, InputOp) and is_summed_input(op.result):
            context.states[op.result] = SumState((SumPart(UNIT_COEFFICIENT, op.result, True),))


def is_scalar(value: SSAValue) -> bool:
    """Whether a value is one real number."""
    return tensor_type(value).is_floating and has_one_entry(tensor_type(value))


def ops_behind(value: SSAValue) -> set[Operation]:
    """The ops that a value depends on."""
    found: set[Operation] = set()
    stack = [value.owner]
    while stack:
        op = stack.pop()
        if isinstance(op, Operation) and op not in found:
            found.add(op)
            stack.extend(o.owner for o in op.operands)
    return found


def _result_states(ctx: LossContext, op: Computation) -> Sequence[ValueState]:
    if (found := states_on_gathered(ctx, op)) is not None:
        return found
    states = _states_of_micro_batch(ctx, op)
    used = [s for r, s in zip(op.results, states, strict=True) if r.uses]
    bad = next((s for s in used if isinstance(s, BadState) and s.op is op), None)
    return (compute_on_gathered(ctx, op, bad) if bad is not None else None) or states


def _states_of_micro_batch(ctx: LossContext, op: Computation) -> list[ValueState]:
    if isinstance(op, GlueOp) and op.target.data == STATISTIC_TARGET:  # made for the loss, logged as well
        return [LOCAL_STATE] * len(op.results)
    for value in op.operands:
        if isinstance(bad := ctx.state_of(value), BadState) and not ctx.is_plain(value):
            return _propagate_bad(ctx, op, bad)
    if isinstance(op, CallOp):
        return states_of_call(ctx, op)
    if (label := recorded_glue.recorded_label(op)) is not None:
        if label.startswith(LOOP_LABEL_PREFIX) and not tensor_type(op.results[0]).dims:
            return [SumState((SumPart(UNIT_COEFFICIENT, op.results[0], True, op),))]
        return [LOCAL_STATE] * len(op.results)  # the numeric check decides whether it keeps samples apart
    if (bad := find_mixing(ctx, op)) is not None:
        return [bad] * len(op.results)
    if (picked := apply_to_picked(ctx, op)) is not None:
        return [picked]
    rule = STATE_RULES.get(op.base_name)
    found = rule(ctx, op) if rule is not None else None
    if found is None:
        found = states_of_other(ctx, op)
    if rule is None and isinstance(op, GlueOp) and (bad := find_mixing_by_numbers(ctx, op)) is not None:
        return [bad] * len(op.results)
    states = list(found) if isinstance(found, Sequence) else [found] + [LOCAL_STATE] * (len(op.results) - 1)
    return [find_pairing(ctx, op, result) or state for result, state in zip(op.results, states, strict=True)]


def _propagate_bad(ctx: LossContext, op: Computation, bad: BadState) -> list[ValueState]:
    """States of the results of an op on a bad value: integers from inputs stay local, all else is bad."""
    if all(
        ctx.is_input_only(r) and ctx.carries_samples(r) and not tensor_type(r).is_floating for r in op.results
    ):
        return [LOCAL_STATE] * len(op.results)
    return [bad] * len(op.results)
