"""Rules for sums and products: where a loss is put together from terms, weights and divisors."""

from __future__ import annotations

from typing import Any

from xdsl.ir import SSAValue

from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import Computation
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.loss.approximations import balance
from secc.passes.loss.coefficient import ONE, Coefficient, of_number
from secc.passes.loss.loss_context import Context, one_entry
from secc.passes.loss.pending_ops import argument
from secc.passes.loss.value_states import Local, Part, Stack, State, Sum

Term = SSAValue | Coefficient


def operand(op: Computation, value: Any) -> Term | None:
    """An argument as one of the op's operands, or as a coefficient where it is a number."""
    return op.operands[value.index] if isinstance(value, argument_template.Ref) else of_number(value)


def still_local(ctx: Context, terms: list[Term]) -> bool:
    """Whether a linear op on these is exact in any micro-batch."""
    return all(
        not ctx.moves(t) if isinstance(t, Coefficient) else isinstance(ctx.state(t), Local) for t in terms
    )


def plain(ctx: Context, terms: list[Term]) -> bool:
    """Whether nothing about these needs to be followed: rows as they are, and numbers without sizes."""
    return all(
        not t.size.free_symbols and not t.factors if isinstance(t, Coefficient) else ctx.state(t) == Local()
        for t in terms
    )


def result(ctx: Context, terms: list[Term], parts: list[Part]) -> State:
    """The state that parts make: Local if all the terms are."""
    return Local(tuple(parts)) if still_local(ctx, terms) else Sum(tuple(parts))


def parts_of(ctx: Context, term: Term) -> tuple[Part, ...] | None:
    return (Part(term),) if isinstance(term, Coefficient) else ctx.parts(term)


def spread(ctx: Context, op: Computation, part: Part, type: TensorType) -> Part | None:
    """A part in the shape of `type`; None if it is a sum over samples that would meet single samples."""
    if part.atom is not None and tensor(part.atom).shape == type.shape:
        return part
    if part.summed and ctx.samples(type):
        coefficient = ctx.part_coefficient(part)
        return None if coefficient is None else spread(ctx, op, Part(coefficient), type)
    if part.atom is None and one_entry(type):
        return part
    if part.atom is None:
        return part.moved(ones(ctx, op, type))
    return part.moved(ctx.shop.glue(op, "aten.expand.default", [part.atom], f"$0, {shape_text(type)}", type))


def ones(ctx: Context, op: Computation, type: TensorType) -> SSAValue:
    """A tensor of ones."""
    args = f"{shape_text(type)}, 1.0, dtype=torch.{type.torch_dtype}, device=device"
    return ctx.shop.glue(op, "aten.full.default", [], args, type)


def shape_text(type: TensorType) -> str:
    """A shape in an argument list."""
    return argument_template.format(argument_template.Arguments([list(type.shape)]))


def add(ctx: Context, op: Computation) -> State | None:
    """`a + alpha * b`, `a - alpha * b`, and `b - alpha * a`."""
    arguments = op.arguments
    if len(arguments.args) < 2:
        return None
    terms = [operand(op, a) for a in arguments.args[:2]]
    alpha = of_number(argument(op, 2, "alpha", 1))
    name = op.base
    if None in terms or alpha is None or plain(ctx, [t for t in terms if t is not None]):
        return None
    signs = {"add": (ONE, alpha), "sub": (ONE, -alpha), "rsub": (-alpha, ONE)}[name]
    type = tensor(op.results[0])
    parts: list[Part] = []
    for term, sign in zip(terms, signs, strict=True):
        assert term is not None
        for part in parts_of(ctx, term) or ():
            if part.atom is None and part.coefficient.number == 0:
                continue
            shaped = spread(ctx, op, part.scaled(sign), type)
            if shaped is None:
                return ctx.bad(op, "combines each sample with a sum over all samples")
            parts.append(shaped)
        if parts_of(ctx, term) is None:
            return None
    return result(ctx, [t for t in terms if t is not None], _merged(parts))


def _merged(parts: list[Part]) -> list[Part]:
    """Parts with one atom joined, where their coefficients differ by a number only."""
    found: list[Part] = []
    for part in parts:
        for i, other in enumerate(found):
            same = (other.atom, other.summed, other.coefficient.size, other.coefficient.factors)
            if same == (part.atom, part.summed, part.coefficient.size, part.coefficient.factors):
                number = other.coefficient.number + part.coefficient.number
                found[i] = Part(
                    Coefficient(number, part.coefficient.size, part.coefficient.factors),
                    part.atom,
                    part.summed,
                    part.origin,
                )
                break
        else:
            found.append(part)
    return found


def multiply(ctx: Context, op: Computation) -> State | None:
    """A product: a weight times a sum, or entries times entries."""
    arguments = op.arguments
    terms = [t for a in arguments.args[:2] if (t := operand(op, a)) is not None]
    if len(terms) != 2 or plain(ctx, terms):
        return None
    left, right = terms
    lefts, rights = parts_of(ctx, left), parts_of(ctx, right)
    if lefts is None or rights is None:
        return _items(ctx, op, left, right)
    parts: list[Part] = []
    for a in lefts:
        for b in rights:
            product = _product(ctx, op, a, b)
            if product is None:
                return balance(
                    ctx, op, "multiplies two sums over samples, or a sum over samples with each sample"
                )
            parts.append(product)
    return result(ctx, terms, parts)


def _product(ctx: Context, op: Computation, a: Part, b: Part) -> Part | None:
    type = tensor(op.results[0])
    for one, other in ((a, b), (b, a)):
        weight = ctx.part_coefficient(one) if one.atom is None or one.summed else None
        if weight is not None:
            return spread(ctx, op, frozen(ctx, op, other.scaled(weight)), type)
    assert a.atom is not None and b.atom is not None
    for one, other in ((a.atom, b), (b.atom, a)):
        if other.summed and ctx.carries(one):
            return None
    if a.summed and b.summed:
        return None
    atom = ctx.shop.glue(op, "aten.mul.Tensor", [a.atom, b.atom], "$0, $1", type)
    return Part(a.coefficient * b.coefficient, atom, a.summed or b.summed, a.origin or b.origin)


def _items(ctx: Context, op: Computation, left: Term, right: Term) -> State | None:
    """A stack of scalars times a number, or times a vector that depends on no sample, item by item."""
    for weight, other in ((left, right), (right, left)):
        stack = ctx.state(other) if isinstance(other, SSAValue) else None
        if not isinstance(stack, Stack):
            continue
        if isinstance(weight, Coefficient):
            return Stack(tuple(scaled(item, weight) for item in stack.items))
        type = tensor(weight)
        if isinstance(ctx.state(weight), Local) and len(type.dims) == 1 and not ctx.carries(weight):
            return Stack(tuple(_weighted(ctx, op, item, weight, i) for i, item in enumerate(stack.items)))
    return None


def _weighted(ctx: Context, op: Computation, item: State, weights: SSAValue, index: int) -> State:
    """One scalar of a stack times its entry of a vector."""
    if not isinstance(item, Sum):
        return item
    one = weights
    if tensor(weights).shape != (1,):
        type = TensorType.of([], tensor(weights).dtype.data, tensor(weights).requires_grad)
        one = ctx.shop.glue(op, "aten.select.int", [weights], f"$0, 0, {index}", type)
    found: list[Part] = []
    for part in item.parts:
        atom = one
        if part.atom is not None:
            atom = ctx.shop.glue(op, "aten.mul.Tensor", [part.atom, one], "$0, $1", tensor(part.atom))
        found.append(part.moved(atom))
    return Sum(tuple(found))


def scaled(state: State, coefficient: Coefficient) -> State:
    """A state times a coefficient."""
    return Sum(tuple(p.scaled(coefficient) for p in state.parts)) if isinstance(state, Sum | Local) else state


def frozen(ctx: Context, op: Computation, part: Part) -> Part:
    """A part as seen by an op: without its gradient where the op ran without grad mode."""
    if "no_grad" in op.properties and part.atom is not None and tensor(part.atom).requires_grad:
        return part.moved(ctx.shop.glue(op, "aten.detach.default", [part.atom], "$0", tensor(part.atom)))
    return part


def divide(ctx: Context, op: Computation) -> State | None:
    """A quotient: a sum divided by a count, a number, or entries by entries."""
    if op.arguments.kwargs.get("rounding_mode") is not None:
        return None
    terms = [t for a in op.arguments.args[:2] if (t := operand(op, a)) is not None]
    if len(terms) != 2 or plain(ctx, terms):
        return None
    above, below = terms
    divisor = below if isinstance(below, Coefficient) else None
    if isinstance(below, SSAValue) and not isinstance(ctx.state(below), Local):
        divisor = ctx.coefficient(below)
        if divisor is None:
            return _bad_divisor(ctx, op, below)
    parts = parts_of(ctx, above)
    if parts is None:
        stack = ctx.state(above) if isinstance(above, SSAValue) else None
        return (
            Stack(tuple(scaled(i, ONE / divisor) for i in stack.items))
            if isinstance(stack, Stack) and divisor is not None
            else None
        )
    if divisor is not None:
        found = [
            spread(ctx, op, frozen(ctx, op, p.scaled(ONE / divisor)), tensor(op.results[0])) for p in parts
        ]
        known = [p for p in found if p is not None]
        return result(ctx, [above, divisor], known) if len(known) == len(found) else None
    assert isinstance(below, SSAValue)
    return _divide_entries(ctx, op, parts, above, below)


def _divide_entries(
    ctx: Context, op: Computation, parts: tuple[Part, ...], above: Term, below: SSAValue
) -> State | None:
    type = tensor(op.results[0])
    found: list[Part] = []
    for part in parts:
        if part.summed and ctx.carries(below):
            return ctx.bad(op, "divides a sum over samples by each sample's own value")
        shaped = part if part.atom is not None else spread(ctx, op, part, tensor(below))
        atom = shaped.atom if shaped is not None else None
        if atom is None:
            return None
        found.append(part.moved(ctx.shop.glue(op, "aten.div.Tensor", [atom, below], "$0, $1", type)))
    return result(ctx, [above, below], found)


def _bad_divisor(ctx: Context, op: Computation, below: SSAValue) -> State:
    if ctx.input_only(below):
        return ctx.bad(op, "divides by a value that depends on all samples and is no sum over them")
    if ctx.drawn(below):
        remedy = "divide by a number that sizes give, or draw the mask in dataset() and pass it"
        return ctx.bad(op, "divides by a sum over samples of random numbers that forward draws", remedy)
    remedy = "divide by something that inputs alone decide, such as the number of labels or the sum of a mask"
    return balance(ctx, op, "divides by a sum over samples that depends on a block's result", remedy)
