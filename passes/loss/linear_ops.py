"""Rules for ops that are linear in one operand: views, selections, casts, masks, contractions. They apply to
each part of a sum alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.ir import SSAValue

from secc.ir.dialect.ops import Computation
from secc.ir.dialect.tensor_type import tensor
from secc.passes.loss.arithmetic import ones, operand, parts_of, plain, result
from secc.passes.loss.coefficient import ONE, of_number
from secc.passes.loss.loss_context import Context, floating, one_entry
from secc.passes.loss.op_tables import RESHAPES
from secc.passes.loss.pending_ops import argument
from secc.passes.loss.value_states import Local, Part, Stack, State, Sum


def linear(ctx: Context, op: Computation) -> State | Sequence[State] | None:
    """An op that is linear in operand 0, the others being rows."""
    if (
        not op.operands
        or ctx.state(op.operands[0]) == Local()
        or not all(ctx.plain(o) for o in op.operands[1:])
    ):
        return None
    state = ctx.state(op.operands[0])
    if isinstance(state, Stack):
        return _item(op, state)
    if op.base == "constant_pad_nd" and argument(op, 2, "value", 0) != 0:
        return None
    found: list[list[Part]] = [[] for _ in op.results]
    for part in ctx.parts(op.operands[0]) or ():
        for i, moved in enumerate(_apply(ctx, op, part)):
            if (
                not moved.summed
                and moved.atom is not None
                and ctx.carries(op.operands[0])
                and not ctx.carries(moved.atom)
            ):
                return ctx.bad(op, "picks some of the samples")
            found[i].append(moved)
    return [result(ctx, [op.operands[0]], parts) for parts in found]


def _apply(ctx: Context, op: Computation, part: Part) -> list[Part]:
    if part.atom is None:
        if op.base in RESHAPES and one_entry(tensor(op.results[0])):
            return [part]
        if op.base == "neg":
            return [part.scaled(-ONE)]
    atom = part.atom if part.atom is not None else ones(ctx, op, tensor(op.operands[0]))
    return [part.moved(value) for value in ctx.shop.rebuild(op, {0: atom})]


def _item(op: Computation, stack: Stack) -> list[State] | None:
    """One scalar of a stack, or all of them, or the same stack in another form."""
    name = op.base
    if name == "select":
        return [stack.items[cast(int, argument(op, 2, "index")) % len(stack.items)]]
    if name == "unbind":
        return list(stack.items)
    return [stack] if name in {"clone", "contiguous", "alias", "detach"} else None


def cast_dtype(ctx: Context, op: Computation) -> State | Sequence[State] | None:
    """A cast is linear, unless it drops fractions."""
    if floating(tensor(op.operands[0])) and not floating(tensor(op.results[0])):
        return None
    return linear(ctx, op)


def where(ctx: Context, op: Computation) -> State | None:
    """`where(mask, a, b)`: the mask is rows; a is kept where it holds, b elsewhere."""
    mask, *choices = (operand(op, a) for a in op.arguments.args)
    if not isinstance(mask, SSAValue) or not ctx.plain(mask) or len(choices) != 2:
        return None
    terms = [c for c in choices if c is not None]
    if len(terms) != 2 or plain(ctx, terms):
        return None
    type, parts = tensor(op.results[0]), list[Part]()
    for term, target, args in zip(
        terms, ("ScalarOther", "ScalarSelf"), ("$0, $1, 0", "$0, 0, $1"), strict=True
    ):
        for part in parts_of(ctx, term) or ():
            if part.summed and ctx.carries(mask):
                return ctx.bad(op, "puts a sum over samples in the place of single samples")
            atom = part.atom if part.atom is not None else ones(ctx, op, type)
            parts.append(part.moved(ctx.shop.glue(op, f"aten.where.{target}", [mask, atom], args, type)))
    return result(ctx, terms, parts)


def masked_fill(ctx: Context, op: Computation) -> State | None:
    """Filling with 0 is linear; another value is not followed."""
    value = argument(op, 2, "value")
    if (
        len(op.operands) != 2
        or value != 0
        or ctx.state(op.operands[0]) == Local()
        or not ctx.plain(op.operands[1])
    ):
        return None
    found: list[Part] = []
    for part in ctx.parts(op.operands[0]) or ():
        if part.atom is None or (part.summed and ctx.carries(op.operands[1])):
            return None
        found.append(part.moved(ctx.shop.rebuild(op, {0: part.atom})[0]))
    return result(ctx, [op.operands[0]], found)


def stack(ctx: Context, op: Computation) -> State | None:
    """Scalars put beside each other keep their own states."""
    refs = op.arguments.args[0]
    if not all(isinstance(ctx.state(o), Local | Sum) and one_entry(tensor(o)) for o in op.operands):
        return None
    if all(ctx.state(o) == Local() for o in op.operands):
        return None
    return Stack(tuple(Sum(ctx.parts(op.operands[r.index]) or ()) for r in refs))


def contraction(ctx: Context, op: Computation) -> State | None:
    """Matrix products: linear in both operands; contracting the samples is a sum over them."""
    left, right = (operand(op, a) for a in op.arguments.args[:2])
    if not isinstance(left, SSAValue) or not isinstance(right, SSAValue):
        return None
    gone = (ctx.carries(left) or ctx.carries(right)) and not ctx.carries(op.results[0])
    if not gone and plain(ctx, [left, right]):
        return None
    found: list[Part] = []
    for a in ctx.parts(left) or ():
        for b in ctx.parts(right) or ():
            if a.atom is None or b.atom is None or a.summed or b.summed:
                return None
            atom = ctx.shop.glue(op, op.callee, [a.atom, b.atom], "$0, $1", tensor(op.results[0]))
            found.append(Part(a.coefficient * b.coefficient, atom, gone, op if gone else None))
    return Sum(tuple(found)) if gone else result(ctx, [left, right], found)


def filled(ctx: Context, op: Computation) -> State | None:
    """A scalar that holds a number or a size, such as `x.new_zeros(())` or `torch.tensor(len(batch))`, is a
    coefficient."""
    if not one_entry(tensor(op.results[0])) or not floating(tensor(op.results[0])):
        return None
    name = op.base.removeprefix("new_").removesuffix("_like")
    position = {"scalar_tensor": 0, "full": 1, "fill": 1}.get(name, -1) + (op.base == "new_full")
    value = of_number(
        {"zeros": 0, "ones": 1}.get(name) if position < 0 else argument(op, position, "fill_value")
    )
    return None if value is None else result(ctx, [value], [Part(value)])
