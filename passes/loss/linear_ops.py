"""Rules for ops that are linear in one operand: views, selections, casts, masks, contractions. They apply to
each part of a sum separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import Computation, GlueOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.arithmetic import (
    OperandTerm,
    are_plain,
    coefficient_of_entry,
    count_few_entries,
    freeze_part,
    make_ones,
    parts_of_entry,
    read_operand,
    scale_state,
    state_of_parts,
    term_parts,
)
from secc.passes.loss.coefficient import (
    UNIT_COEFFICIENT,
    AppliedFactor,
    Coefficient,
    coefficient_of_factor,
    coefficient_of_number,
)
from secc.passes.loss.loss_context import LossContext, has_one_entry
from secc.passes.loss.op_tables import PICKING_OPS, RESHAPE_OPS
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.picked_entries import pick_entries
from secc.passes.loss.value_states import LocalState, StackState, SumPart, SumState, ValueState

# `where(mask, x, 0)` and `where(mask, 0, x)`.
_WHERE_OR_ZERO = (("aten.where.ScalarOther", "$0, $1, 0"), ("aten.where.ScalarSelf", "$0, 0, $1"))


def state_of_linear(ctx: LossContext, op: Computation) -> ValueState | Sequence[ValueState] | None:
    """An op that is linear in operand 0; the other operands are rows."""
    if (
        not op.operands
        or ctx.state_of(op.operands[0]) == LocalState()
        or not all(ctx.is_plain(o) for o in op.operands[1:])
    ):
        return None
    if op.base_name in PICKING_OPS and not isinstance(ctx.state_of(op.operands[0]), LocalState):
        return pick_entries(ctx, op)
    state = ctx.state_of(op.operands[0])
    if isinstance(state, StackState):
        return _stack_items(op, state)
    if op.base_name == "constant_pad_nd" and get_argument(op, 2, "value", 0) != 0:
        return None
    found: list[list[SumPart]] = [[] for _ in op.results]
    for part in ctx.parts_of(op.operands[0]) or ():
        for i, moved in enumerate(_apply_to_part(ctx, op, part)):
            if (
                not moved.summed
                and moved.atom is not None
                and ctx.carries_samples(op.operands[0])
                and not ctx.carries_samples(moved.atom)
            ):
                return ctx.refuse_op(op, "picks some of the samples")
            found[i].append(moved)
    return [state_of_parts(ctx, [op.operands[0]], parts) for parts in found]


def _apply_to_part(ctx: LossContext, op: Computation, part: SumPart) -> list[SumPart]:
    if part.atom is None:
        if op.base_name in RESHAPE_OPS and has_one_entry(tensor_type(op.results[0])):
            return [part]
        if op.base_name == "neg":
            return [part.scale_by(-UNIT_COEFFICIENT)]
    atom = part.atom if part.atom is not None else make_ones(ctx, op, tensor_type(op.operands[0]))
    return [part.with_atom(value) for value in ctx.pending.rebuild_op(op, {0: atom})]


def _stack_items(op: Computation, stack: StackState) -> list[ValueState] | None:
    """One scalar of a stack, or all of them, or the same stack in another form."""
    name = op.base_name
    if name == "select":
        return [stack.items[cast(int, get_argument(op, 2, "index")) % len(stack.items)]]
    if name == "unbind":
        return list(stack.items)
    if name == "slice":
        bounds = (get_argument(op, 2, "start"), get_argument(op, 3, "end"), get_argument(op, 4, "step", 1))
        return [StackState(stack.items[slice(*cast("tuple[int | None, ...]", bounds))])]
    if name == "neg":
        return [StackState(tuple(scale_state(item, -UNIT_COEFFICIENT) for item in stack.items))]
    return [stack] if name in {"clone", "contiguous", "alias", "detach", "_to_copy"} else None


def state_of_cast(ctx: LossContext, op: Computation) -> ValueState | Sequence[ValueState] | None:
    """A cast is linear, unless it drops fractions."""
    if tensor_type(op.operands[0]).is_floating and not tensor_type(op.results[0]).is_floating:
        return None
    return state_of_linear(ctx, op)


def state_of_where(ctx: LossContext, op: Computation) -> ValueState | None:
    """`where(mask, a, b)` with a mask of rows: `a` where it holds, `b` elsewhere."""
    mask, *choices = (read_operand(op, a) for a in op.arguments.args)
    terms = [c for c in choices if c is not None]
    if not isinstance(mask, SSAValue) or len(terms) != 2:
        return None
    if not ctx.is_plain(mask):
        return _choose_by_coefficients(ctx, op, mask, terms)
    if are_plain(ctx, terms):
        return None
    type, parts = tensor_type(op.results[0]), list[SumPart]()
    for term, (target, args) in zip(terms, _WHERE_OR_ZERO, strict=True):
        for part in term_parts(ctx, term) or ():
            if part.summed and ctx.carries_samples(mask):
                return ctx.refuse_op(op, "puts a sum over samples in the place of single samples")
            atom = part.atom if part.atom is not None else make_ones(ctx, op, type)
            parts.append(part.with_atom(ctx.pending.make_glue(op, target, [mask, atom], args, type)))
    return state_of_parts(ctx, terms, parts)


def _choose_by_coefficients(
    ctx: LossContext, op: Computation, mask: SSAValue, terms: Sequence[OperandTerm]
) -> ValueState | None:
    """`where(counts > 0, sums / counts, 0)`, of one number or a short vector, with conditions that are known
    before any forward: each entry's coefficients are chosen. None for others."""
    is_scalar = not tensor_type(op.results[0]).dims
    entries = list[SumState]()
    for i in range(1 if is_scalar else count_few_entries(op.results[0]) or 0):
        condition, parts = coefficient_of_entry(ctx, op, mask, i), list[SumPart]()
        for term, (target, args) in zip(terms, _WHERE_OR_ZERO, strict=True):
            found = parts_of_entry(ctx, op, term, i)
            if condition is None or found is None:
                return None
            chosen = ctx.pending.make_glue(op, target, [mask, mask], args, TensorType.from_dims([], "f32"))
            parts += [_choose_part(chosen, condition, freeze_part(ctx, op, part)) for part in found]
        entries.append(SumState(tuple(parts)))
    return None if not entries else entries[0] if is_scalar else StackState(tuple(entries))


def _choose_part(chosen: SSAValue, condition: Coefficient, part: SumPart) -> SumPart:
    """A part with 0 in place of its coefficient where a condition does not hold."""
    assert isinstance(chosen.owner, GlueOp)
    factor = AppliedFactor(chosen.owner, (condition, part.coefficient))
    return replace(part, coefficient=coefficient_of_factor(factor))


def state_of_masked_fill(ctx: LossContext, op: Computation) -> ValueState | None:
    """Filling with 0 is linear; other values are not followed."""
    value = get_argument(op, 2, "value")
    parts = ctx.parts_of(op.operands[0]) if len(op.operands) == 2 else None
    if (
        parts is None
        or value != 0
        or ctx.state_of(op.operands[0]) == LocalState()
        or not ctx.is_plain(op.operands[1])
    ):
        return None
    found: list[SumPart] = []
    for part in parts:
        if part.atom is None or (part.summed and ctx.carries_samples(op.operands[1])):
            return None
        found.append(part.with_atom(ctx.pending.rebuild_op(op, {0: part.atom})[0]))
    return state_of_parts(ctx, [op.operands[0]], found)


def state_of_stack(ctx: LossContext, op: Computation) -> ValueState | None:
    """Scalars that are stacked keep their own states, unless all are local, be they numbers or weights."""
    refs = op.arguments.args[0]
    if not all(
        isinstance(ctx.state_of(o), LocalState | SumState) and has_one_entry(tensor_type(o))
        for o in op.operands
    ):
        return None
    if all(isinstance(ctx.state_of(o), LocalState) for o in op.operands):
        return None
    return StackState(tuple(SumState(ctx.parts_of(op.operands[r.index]) or ()) for r in refs))


def state_of_contraction(ctx: LossContext, op: Computation) -> ValueState | None:
    """Matrix products: linear in both operands; a contraction over the samples is a sum over them."""
    left, right = (read_operand(op, a) for a in op.arguments.args[:2])
    if not isinstance(left, SSAValue) or not isinstance(right, SSAValue):
        return None
    gone = (ctx.carries_samples(left) or ctx.carries_samples(right)) and not ctx.carries_samples(
        op.results[0]
    )
    if not gone and are_plain(ctx, [left, right]):
        return None
    left_parts, right_parts = ctx.parts_of(left), ctx.parts_of(right)
    if left_parts is None or right_parts is None:  # scalars in a stack
        return None
    found: list[SumPart] = []
    for a in left_parts:
        for b in right_parts:
            if a.atom is None or b.atom is None or a.summed or b.summed:
                return None
            atom = ctx.pending.make_glue(
                op, op.callee, [a.atom, b.atom], "$0, $1", tensor_type(op.results[0])
            )
            found.append(SumPart(a.coefficient * b.coefficient, atom, gone, op if gone else None))
    return SumState(tuple(found)) if gone else state_of_parts(ctx, [left, right], found)


def state_of_filled(ctx: LossContext, op: Computation) -> ValueState | None:
    """A scalar that holds a number or a size, such as `x.new_zeros(())` or `torch.tensor(len(batch))`, is a
    coefficient."""
    if not has_one_entry(tensor_type(op.results[0])) or not tensor_type(op.results[0]).is_floating:
        return None
    name = op.base_name.removeprefix("new_").removesuffix("_like")
    position = {"scalar_tensor": 0, "full": 1, "fill": 1}.get(name, -1) + (op.base_name == "new_full")
    value = coefficient_of_number(
        {"zeros": 0, "ones": 1}.get(name) if position < 0 else get_argument(op, position, "fill_value")
    )
    return None if value is None else state_of_parts(ctx, [value], [SumPart(value)])
