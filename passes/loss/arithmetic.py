"""Rules for sums and products, from which a loss is composed of terms, weights and divisors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.ir import SSAValue

from secc.ir.analysis.dataflow import producer_of
from secc.ir.dialect import argument_template
from secc.ir.dialect.ops import CallOp, Computation, GlueOp, ParamOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.approximations import take_function_of_sums
from secc.passes.loss.batch_statistics import reads_statistics
from secc.passes.loss.coefficient import (
    SCALAR_TYPE,
    UNIT_COEFFICIENT,
    AppliedFactor,
    Coefficient,
    coefficient_of_factor,
    coefficient_of_number,
)
from secc.passes.loss.loss_context import LossContext, has_one_entry, is_rerecorded
from secc.passes.loss.op_tables import ENTRYWISE_OPS, VECTOR_OPS
from secc.passes.loss.pending_ops import get_argument
from secc.passes.loss.value_states import LocalState, StackState, SumPart, SumState, ValueState

OperandTerm = SSAValue | Coefficient
_MOST_ENTRIES = 64  # of a vector of sums that is followed entry by entry; each becomes a term of the loss
_STATISTIC_TIMES_SUM = "multiplies a sum over samples by a function of sums over the batch"


def read_operand(op: Computation, value: Any) -> OperandTerm | None:
    """An argument as one of the op's operands, or as a coefficient where it is a number; None for anything
    else."""
    return (
        op.operands[value.index]
        if isinstance(value, argument_template.OperandRef)
        else coefficient_of_number(value)
    )


def are_still_local(ctx: LossContext, terms: list[OperandTerm]) -> bool:
    """Whether a linear op on these terms is exact in any micro-batch."""
    return all(
        not ctx.depends_on_batch(t) if isinstance(t, Coefficient) else isinstance(ctx.state_of(t), LocalState)
        for t in terms
    )


def are_plain(ctx: LossContext, terms: list[OperandTerm]) -> bool:
    """Whether nothing about these terms needs to be followed: rows as they are, and numbers without sizes."""
    return all(
        not t.size.free_symbols and not t.factors
        if isinstance(t, Coefficient)
        else ctx.state_of(t) == LocalState()
        for t in terms
    )


def state_of_parts(ctx: LossContext, terms: list[OperandTerm], parts: list[SumPart]) -> ValueState:
    """The state of a sum of parts: local if all terms that they came from are."""
    return LocalState(tuple(parts)) if are_still_local(ctx, terms) else SumState(tuple(parts))


def term_parts(ctx: LossContext, term: OperandTerm) -> tuple[SumPart, ...] | None:
    """A term as a sum of parts; None where it is not one."""
    return (SumPart(term),) if isinstance(term, Coefficient) else ctx.parts_of(term)


def broadcast_part(ctx: LossContext, op: Computation, part: SumPart, type: TensorType) -> SumPart | None:
    """A part in the shape of `type`; None if it is a sum over samples that would meet single samples."""
    if part.atom is not None and tensor_type(part.atom).shape == type.shape:
        return part
    if part.summed and ctx.sample_dims(type):
        coefficient = ctx.coefficient_of_part(part)
        return None if coefficient is None else broadcast_part(ctx, op, SumPart(coefficient), type)
    if part.atom is None and has_one_entry(type):
        return part
    if part.atom is None:
        return part.with_atom(make_ones(ctx, op, type))
    return part.with_atom(
        ctx.pending.make_glue(op, "aten.expand.default", [part.atom], f"$0, {format_shape(type)}", type)
    )


def make_ones(ctx: LossContext, op: Computation, type: TensorType) -> SSAValue:
    """A tensor of ones."""
    args = f"{format_shape(type)}, 1.0, dtype=torch.{type.torch_dtype}, device=device"
    return ctx.pending.make_glue(op, "aten.full.default", [], args, type)


def format_shape(type: TensorType) -> str:
    """A shape in an argument list."""
    return argument_template.format_arguments(argument_template.CallArguments([list(type.shape)]))


def state_of_addition(ctx: LossContext, op: Computation) -> ValueState | None:
    """`a + alpha * b`, `a - alpha * b`, and `b - alpha * a`. None where the general rule applies."""
    arguments = op.arguments
    if len(arguments.args) < 2 or tensor_type(op.results[0]).dtype.data == "bool":  # `or` of truth values
        return None
    terms = [read_operand(op, a) for a in arguments.args[:2]]
    alpha = coefficient_of_number(get_argument(op, 2, "alpha", 1))
    name = op.base_name
    if None in terms or alpha is None or are_plain(ctx, [t for t in terms if t is not None]):
        return None
    signs = {
        "add": (UNIT_COEFFICIENT, alpha),
        "sub": (UNIT_COEFFICIENT, -alpha),
        "rsub": (-alpha, UNIT_COEFFICIENT),
    }[name]
    type = tensor_type(op.results[0])
    parts: list[SumPart] = []
    for term, sign in zip(terms, signs, strict=True):
        assert term is not None
        for part in term_parts(ctx, term) or ():
            if part.atom is None and part.coefficient.number == 0:
                continue
            shaped = broadcast_part(ctx, op, part.scale_by(sign), type)
            if shaped is None:
                return take_function_of_sums(ctx, op, "combines each sample with a sum over all samples")
            parts.append(shaped)
        if term_parts(ctx, term) is None:
            return _add_to_stack(
                ctx, op, [(t, s) for t, s in zip(terms, signs, strict=True) if t is not None]
            )
    return state_of_parts(ctx, [t for t in terms if t is not None], _merge_parts(parts))


def _add_to_stack(
    ctx: LossContext, op: Computation, terms: list[tuple[OperandTerm, Coefficient]]
) -> ValueState | None:
    """Adds stacks of scalars, numbers and vectors that depend on no sample, each term times its sign, item by
    item. None where a term is something else."""
    states = [ctx.state_of(t) for t, _ in terms if isinstance(t, SSAValue)]
    counts = {len(s.items) for s in states if isinstance(s, StackState)}
    if len(counts) != 1:
        return None
    items = list[ValueState]()
    for i in range(counts.pop()):
        found = [(parts_of_entry(ctx, op, term, i), sign) for term, sign in terms]
        if any(parts is None for parts, _ in found):
            return None
        items.append(
            SumState(tuple(_merge_parts([p.scale_by(s) for parts, s in found for p in parts or ()])))
        )
    return StackState(tuple(items))


def parts_of_entry(
    ctx: LossContext, op: Computation, term: OperandTerm, index: int
) -> tuple[SumPart, ...] | None:
    """The parts of one entry of a number, a vector or a stack of scalars; None for what has rows of samples,
    or more dims."""
    if isinstance(term, Coefficient):
        return (SumPart(term),)
    state = ctx.state_of(term)
    if isinstance(state, StackState):
        item = state.items[index]
        return item.parts if isinstance(item, SumState) else None
    parts = ctx.parts_of(term)
    if parts is None or len(tensor_type(term).dims) > 1 or ctx.carries_samples(term):
        return None
    return tuple(_select_entry(ctx, op, part, index) for part in parts)


def _select_entry(ctx: LossContext, op: Computation, part: SumPart, index: int) -> SumPart:
    """One entry of a part that is a vector, or a scalar."""
    if part.atom is None or not (type := tensor_type(part.atom)).dims:
        return part
    if (number := coefficient_of_number(ctx.literal_value(part.atom))) is not None:
        return SumPart(part.coefficient * number)
    scalar = TensorType.from_dims([], type.dtype.data, type.requires_grad)
    at = 0 if type.shape == (1,) else index
    entry = ctx.pending.make_glue(op, "aten.select.int", [part.atom], f"$0, 0, {at}", scalar)
    return part.with_atom(entry)


def count_few_entries(value: SSAValue) -> int | None:
    """The number of entries of a short vector of known length; None for others."""
    shape = tensor_type(value).shape
    is_short = len(shape) == 1 and shape[0].is_Integer and 1 < shape[0] <= _MOST_ENTRIES
    return int(shape[0]) if is_short else None


def apply_to_entries(ctx: LossContext, op: Computation) -> ValueState | None:
    """An op on short vectors of coefficients (a count for each codebook), entry by entry. None for others."""
    if not isinstance(op, GlueOp) or op.base_name not in ENTRYWISE_OPS:
        return None
    if (count := count_few_entries(op.results[0])) is None:
        return None
    items = list[ValueState]()
    for i in range(count):
        entries = [coefficient_of_entry(ctx, op, value, i) for value in op.operands]
        known = tuple(entry for entry in entries if entry is not None)
        if len(known) < len(entries):
            return None
        items.append(SumState((SumPart(coefficient_of_factor(AppliedFactor(op, known))),)))
    return StackState(tuple(items))


def apply_to_vector(ctx: LossContext, op: Computation) -> list[ValueState] | None:
    """States of what an op computes from all entries of a short vector of coefficients (a median, a softmax):
    a scalar, or a vector of as many entries. None for other ops and operands."""
    count = count_few_entries(op.operands[0])
    if not isinstance(op, GlueOp) or len(op.operands) > 1 or op.base_name not in VECTOR_OPS or count is None:
        return None
    if not isinstance(ctx.state_of(op.operands[0]), SumState | StackState):
        return None
    entries = [coefficient_of_entry(ctx, op, op.operands[0], i) for i in range(count)]
    known = tuple(entry for entry in entries if entry is not None)
    if len(known) < count:
        return None
    places = f"[{', '.join(f'${i}' for i in range(count))}]"
    stack = _make_helper_op(ctx, op, "aten.stack.default", [op.operands[0]] * count, places)
    vector = coefficient_of_factor(AppliedFactor(stack, known, count))
    states: list[ValueState] = [ctx.refuse_op(op, "returns places in a vector of sums over samples")] * len(
        op.results
    )
    if not tensor_type(op.results[0]).dims:
        states[0] = SumState((SumPart(coefficient_of_factor(AppliedFactor(op, (vector,)))),))
        return states
    if count_few_entries(op.results[0]) != count:
        return None
    computed = coefficient_of_factor(AppliedFactor(op, (vector,), count))
    items = list[ValueState]()
    for i in range(count):
        pick = _make_helper_op(ctx, op, "aten.select.int", [op.results[0]], f"$0, 0, {i}")
        items.append(SumState((SumPart(coefficient_of_factor(AppliedFactor(pick, (computed,)))),)))
    states[0] = StackState(tuple(items))
    return states


def _make_helper_op(
    ctx: LossContext, like: Computation, target: str, operands: Sequence[SSAValue], args: str
) -> GlueOp:
    """An op on coefficients that the user's code does not have."""
    made = ctx.pending.make_glue(like, target, list(operands), args, SCALAR_TYPE).owner
    assert isinstance(made, GlueOp)
    return made


def coefficient_of_entry(
    ctx: LossContext, op: Computation, term: OperandTerm, index: int
) -> Coefficient | None:
    """One entry of a term as a coefficient."""
    return ctx.coefficient_of_parts(parts_of_entry(ctx, op, term, index) or ())


def _scale_items(
    ctx: LossContext, op: Computation, scaled: OperandTerm, weight: OperandTerm, divides: bool
) -> ValueState | None:
    """A short vector of sums times, or divided by, a vector of coefficients, entry by entry. None for
    others."""
    items = list[ValueState]()
    for i in range(count_few_entries(op.results[0]) or 0):
        parts, factor = parts_of_entry(ctx, op, scaled, i), coefficient_of_entry(ctx, op, weight, i)
        if parts is None or factor is None:
            return None
        factor = UNIT_COEFFICIENT / factor if divides else factor
        items.append(SumState(tuple(freeze_part(ctx, op, p.scale_by(factor)) for p in parts)))
    return StackState(tuple(items)) if items else None


def _merge_parts(parts: list[SumPart]) -> list[SumPart]:
    """Parts with one atom joined, where their coefficients differ by a number only."""
    found: list[SumPart] = []
    for part in parts:
        for i, other in enumerate(found):
            same = (other.atom, other.summed, other.coefficient.size, other.coefficient.factors)
            if same == (part.atom, part.summed, part.coefficient.size, part.coefficient.factors):
                number = other.coefficient.number + part.coefficient.number
                found[i] = SumPart(
                    Coefficient(number, part.coefficient.size, part.coefficient.factors),
                    part.atom,
                    part.summed,
                    part.origin,
                )
                break
        else:
            found.append(part)
    return found


def state_of_product(ctx: LossContext, op: Computation) -> ValueState | None:
    """A product: a weight times a sum, or entries times entries. None where the general rule applies."""
    arguments = op.arguments
    terms = [t for a in arguments.args[:2] if (t := read_operand(op, a)) is not None]
    if len(terms) != 2 or are_plain(ctx, terms):
        return None
    left, right = terms
    if any(_scales_sum_by_statistic(ctx, a, b) for a, b in ((left, right), (right, left))):
        return take_function_of_sums(ctx, op, _STATISTIC_TIMES_SUM)
    lefts, rights = term_parts(ctx, left), term_parts(ctx, right)
    if lefts is None or rights is None:
        return _multiply_stack(ctx, op, left, right)
    parts: list[SumPart] = []
    for a in lefts:
        for b in rights:
            product = _multiply_parts(ctx, op, a, b)
            if product is None:
                return take_function_of_sums(
                    ctx, op, "multiplies two sums over samples, or a sum over samples with each sample"
                )
            parts.append(product)
    return state_of_parts(ctx, terms, parts)


def _scales_sum_by_statistic(ctx: LossContext, weight: OperandTerm, scaled: OperandTerm) -> bool:
    """Whether a weight is computed, with a gradient, from statistics of the global batch, and what it scales
    is a sum over samples: a micro-batch's gradient of the weight would count by its sum, not by its share of
    the samples."""
    if not isinstance(weight, SSAValue) or not isinstance(scaled, SSAValue):
        return False
    once = isinstance(ctx.state_of(weight), LocalState) and tensor_type(weight).requires_grad
    return once and not isinstance(ctx.state_of(scaled), LocalState) and reads_statistics(weight)


def _multiply_parts(ctx: LossContext, op: Computation, a: SumPart, b: SumPart) -> SumPart | None:
    type = tensor_type(op.results[0])
    for one, other in ((a, b), (b, a)):
        weight = ctx.coefficient_of_part(one) if one.atom is None or one.summed else None
        if weight is not None:
            return broadcast_part(ctx, op, freeze_part(ctx, op, other.scale_by(weight)), type)
    assert a.atom is not None and b.atom is not None
    for one, other in ((a.atom, b), (b.atom, a)):
        if other.summed and ctx.carries_samples(one):
            return None
    if a.summed and b.summed:
        return None
    atom = ctx.pending.make_glue(op, "aten.mul.Tensor", [a.atom, b.atom], "$0, $1", type)
    return SumPart(a.coefficient * b.coefficient, atom, a.summed or b.summed, a.origin or b.origin)


def _multiply_stack(
    ctx: LossContext, op: Computation, left: OperandTerm, right: OperandTerm
) -> ValueState | None:
    """A stack of scalars times a number, or times a vector, item by item."""
    for weight, other in ((left, right), (right, left)):
        if (scaled := _scale_items(ctx, op, other, weight, divides=False)) is not None:
            return scaled
    for weight, other in ((left, right), (right, left)):
        stack = ctx.state_of(other) if isinstance(other, SSAValue) else None
        if not isinstance(stack, StackState):
            continue
        if isinstance(weight, Coefficient):
            return StackState(tuple(scale_state(item, weight) for item in stack.items))
        if not isinstance(ctx.state_of(weight), LocalState):
            continue
        entries = [parts_of_entry(ctx, op, weight, i) or () for i in range(len(stack.items))]
        weights = [atom for parts in entries for p in parts if (atom := p.atom) is not None]
        if len(weights) == len(stack.items):
            pairs = zip(stack.items, weights, strict=True)
            return StackState(tuple(_weight_item(ctx, op, item, w) for item, w in pairs))
    return None


def _weight_item(ctx: LossContext, op: Computation, item: ValueState, weight: SSAValue) -> ValueState:
    """One scalar of a stack times a weight."""
    if not isinstance(item, SumState):
        return item
    found: list[SumPart] = []
    for part in item.parts:
        atom = weight
        if part.atom is not None:
            atom = ctx.pending.make_glue(
                op, "aten.mul.Tensor", [part.atom, weight], "$0, $1", tensor_type(part.atom)
            )
        found.append(part.with_atom(atom))
    return SumState(tuple(found))


def scale_state(state: ValueState, coefficient: Coefficient) -> ValueState:
    """A state times a coefficient."""
    return (
        SumState(tuple(p.scale_by(coefficient) for p in state.parts))
        if isinstance(state, SumState | LocalState)
        else state
    )


def freeze_part(ctx: LossContext, op: Computation, part: SumPart) -> SumPart:
    """A part as an op reads it: without its gradient where the op ran without grad mode."""
    if "no_grad" in op.properties and part.atom is not None and tensor_type(part.atom).requires_grad:
        return part.with_atom(
            ctx.pending.make_glue(op, "aten.detach.default", [part.atom], "$0", tensor_type(part.atom))
        )
    return part


def state_of_quotient(ctx: LossContext, op: Computation) -> ValueState | None:
    """A quotient: a sum divided by a count, by a number, or entry by entry. None where the general rule
    applies."""
    if op.arguments.kwargs.get("rounding_mode") is not None:
        return None
    terms = [t for a in op.arguments.args[:2] if (t := read_operand(op, a)) is not None]
    if len(terms) != 2 or are_plain(ctx, terms):
        return None
    above, below = terms
    if _scales_sum_by_statistic(ctx, below, above):
        return take_function_of_sums(ctx, op, _STATISTIC_TIMES_SUM)
    divisor = below if isinstance(below, Coefficient) else None
    if isinstance(below, SSAValue) and not isinstance(ctx.state_of(below), LocalState):
        divisor = ctx.coefficient_of(below)
        if divisor is None:
            if (divided := _scale_items(ctx, op, above, below, divides=True)) is not None:
                return divided
            return _divide_by_weighted_sum(ctx, op, above, below) or _refuse_divisor(ctx, op, below)
    parts = term_parts(ctx, above)
    if parts is None:
        stack = ctx.state_of(above) if isinstance(above, SSAValue) else None
        return (
            StackState(tuple(scale_state(i, UNIT_COEFFICIENT / divisor) for i in stack.items))
            if isinstance(stack, StackState) and divisor is not None
            else None
        )
    if divisor is not None:
        found = [
            broadcast_part(
                ctx,
                op,
                freeze_part(ctx, op, p.scale_by(UNIT_COEFFICIENT / divisor)),
                tensor_type(op.results[0]),
            )
            for p in parts
        ]
        known = [p for p in found if p is not None]
        return state_of_parts(ctx, [above, divisor], known) if len(known) == len(found) else None
    assert isinstance(below, SSAValue)
    return _divide_entries(ctx, op, parts, above, below)


def _divide_by_weighted_sum(
    ctx: LossContext, op: Computation, above: OperandTerm, below: SSAValue
) -> ValueState | None:
    """A sum divided by a sum that inputs decide times a number that no sample decides, as of a buffer or a
    parameter: `loss.sum() / (mask.sum() * self.weights.sum())`."""
    parts, divisors = term_parts(ctx, above), ctx.parts_of(below) or ()
    if parts is None or len(divisors) != 1:
        return None
    (divisor,) = divisors
    if divisor.atom is None or divisor.summed or ctx.carries_samples(divisor.atom):
        return None
    scaled = tuple(p.scale_by(UNIT_COEFFICIENT / divisor.coefficient) for p in parts)
    return _divide_entries(ctx, op, scaled, above, divisor.atom)


def _divide_entries(
    ctx: LossContext, op: Computation, parts: tuple[SumPart, ...], above: OperandTerm, below: SSAValue
) -> ValueState | None:
    type = tensor_type(op.results[0])
    found: list[SumPart] = []
    for part in parts:
        if part.summed and ctx.carries_samples(below):
            return ctx.refuse_op(op, "divides a sum over samples by each sample's own value")
        shaped = part if part.atom is not None else broadcast_part(ctx, op, part, tensor_type(below))
        atom = shaped.atom if shaped is not None else None
        if atom is None:
            return None
        found.append(
            part.with_atom(ctx.pending.make_glue(op, "aten.div.Tensor", [atom, below], "$0, $1", type))
        )
    return state_of_parts(ctx, [above, below], found)


def _refuse_divisor(ctx: LossContext, op: Computation, below: SSAValue) -> ValueState:
    if ctx.is_known_ahead(below):
        return ctx.refuse_op(op, "divides by a value that depends on all samples and is no sum over them")
    cause = "on ops that Python chooses by the inputs" if is_rerecorded(below) else "on a block's result"
    remedy = "divide by something that inputs alone decide, such as the number of labels or the sum of a mask"
    if parameter := _only_parameter_behind(below):
        cause, remedy = f"on the parameter {parameter}", "register it as a buffer, which a plan knows"
    return take_function_of_sums(ctx, op, f"divides by a sum over samples that depends {cause}", remedy)


def _only_parameter_behind(value: SSAValue) -> str:
    """The name of the parameter or buffer that a value depends on, "" where it depends on a block."""
    queue, seen, found = [value], set[SSAValue](), ""
    while queue:
        op = producer_of(queue.pop())
        if isinstance(op, CallOp):
            return ""
        if isinstance(op, ParamOp):
            found = found or op.path.data
        queue += [o for o in op.operands if o not in seen]
        seen.update(op.operands)
    return found
