"""The walk over one case's ops from inputs to the loss: each op's rule gives the states of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xdsl.ir import Operation, SSAValue

from secc.errors import UserError
from secc.ir.analysis import recorded_glue
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, ConstOp, GraphOp, ReturnOp
from secc.ir.dialect.tensor_type import tensor
from secc.passes.loss import arithmetic, linear_ops, reductions
from secc.passes.loss.coefficient import ONE, Coefficient
from secc.passes.loss.loss_context import Context, floating, one_entry
from secc.passes.loss.op_tables import ENTRY_LOSSES, LABEL_LOSSES, LINEAR, PRODUCTS, REDUCTIONS, ROW_LOSSES
from secc.passes.loss.sample_mixing import call, mixing, other, pairing
from secc.passes.loss.value_states import LOCAL, Bad, Local, Part, State, Sum
from secc.runtime.plan.schema import LOOP

Rule = Callable[[Context, Computation], "State | Sequence[State] | None"]

RULES: dict[str, Rule] = (
    dict.fromkeys(LINEAR, linear_ops.linear)
    | dict.fromkeys(REDUCTIONS, reductions.other_reduction)
    | dict.fromkeys(PRODUCTS, linear_ops.contraction)
    | dict.fromkeys([*ENTRY_LOSSES, *ROW_LOSSES], reductions.loss)
    | dict.fromkeys(LABEL_LOSSES, reductions.label_loss)
    | dict.fromkeys(["_to_copy", "to", "float", "double"], linear_ops.cast_dtype)
    | dict.fromkeys(["add", "sub", "rsub"], arithmetic.add)
    | dict.fromkeys(["sum", "mean"], reductions.sum_or_mean)
    | dict.fromkeys(["histc", "scatter_add", "index_add"], reductions.histogram)
    | dict.fromkeys(["stack", "cat"], linear_ops.stack)
    | dict.fromkeys(
        ["full", "scalar_tensor", "fill", "zeros", "ones", "new_zeros", "new_ones", "new_full"],
        linear_ops.filled,
    )
    | dict.fromkeys(["zeros_like", "ones_like", "full_like"], linear_ops.filled)
    | {
        "mul": arithmetic.multiply,
        "div": arithmetic.divide,
        "where": linear_ops.where,
        "masked_fill": linear_ops.masked_fill,
    }
)


def walk(graph: GraphOp, case: CaseOp, accept: Collection[str] = ()) -> tuple[Context, State]:
    """Facts about a case and the state of its loss; `accept` names approximations that may be taken."""
    context = Context(graph, case, accept)
    end = case.ops[-1]
    assert isinstance(end, ReturnOp)
    loss = end.operands[0]
    _walk(context, slice_of(loss))
    return context, context.state(loss)


def walk_logged(context: Context, value: SSAValue) -> State:
    """The state of a scalar that is logged. What the loss does not need is walked here: nothing of it refuses
    a model."""
    try:
        _walk(context, slice_of(value))
    except UserError as error:
        assert isinstance(value.owner, Operation)
        return Bad(error.message, value.owner, error.remedy or "")
    return context.state(value)


def _walk(context: Context, needed: set[Operation]) -> None:
    for op in context.case.ops:
        if op.results and op.results[0] in context.states:
            continue
        if op in needed and isinstance(op, Computation):
            context.states.update(zip(op.results, _states(context, op), strict=True))
        elif (
            isinstance(op, ConstOp)
            and (number := context.literal(op.result)) is not None
            and scalar(op.result)
        ):
            context.states[op.result] = Local((Part(Coefficient(number=number)),))


def scalar(value: SSAValue) -> bool:
    """Whether a value is one real number."""
    return floating(tensor(value)) and one_entry(tensor(value))


def slice_of(value: SSAValue) -> set[Operation]:
    """The ops that a value depends on."""
    found: set[Operation] = set()
    stack = [value.owner]
    while stack:
        op = stack.pop()
        if isinstance(op, Operation) and op not in found:
            found.add(op)
            stack.extend(o.owner for o in op.operands)
    return found


def _states(ctx: Context, op: Computation) -> list[State]:
    for value in op.operands:
        if isinstance(bad := ctx.state(value), Bad) and not ctx.plain(value):
            return _spoilt(ctx, op, bad)
    if isinstance(op, CallOp):
        return call(ctx, op)
    if (label := recorded_glue.label(op)) is not None:
        if label.startswith(LOOP) and not tensor(op.results[0]).dims:
            return [Sum((Part(ONE, op.results[0], True, op),))]
        return [LOCAL] * len(op.results)  # the numeric check decides whether it keeps samples apart
    if (bad := mixing(ctx, op)) is not None:
        return [bad] * len(op.results)
    rule = RULES.get(op.base)
    found = rule(ctx, op) if rule is not None else None
    if found is None:
        found = other(ctx, op)
    states = list(found) if isinstance(found, Sequence) else [found] + [LOCAL] * (len(op.results) - 1)
    return [pairing(ctx, op, result) or state for result, state in zip(op.results, states, strict=True)]


def _spoilt(ctx: Context, op: Computation, bad: Bad) -> list[State]:
    """What follows a mixing op: integers from inputs stay bookkeeping, all else is as bad."""
    if all(ctx.input_only(r) and ctx.carries(r) and not floating(tensor(r)) for r in op.results):
        return [LOCAL] * len(op.results)
    return [bad] * len(op.results)
