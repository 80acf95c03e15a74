"""`normalize-loss`: rewrites the loss of every case into terms, coefficient times numerator, plus a constant.

A mean over a micro-batch is not a share of the mean over the whole batch, so a distributed loss needs sums:
the numerator of a term adds up over samples, its coefficient comes from inputs and sizes of the whole global
batch. `secc.passes.loss` walks each case from inputs to loss and says of every value whether it is rows, a
sum, or mixes samples; a loss that mixes them is refused here with the op and the user's line. The old tail of
the loss is left for `dce`.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context as XdslContext
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CaseOp, GlueOp, LeafOp, ReturnOp, TermOp, graph_of, strings, texts
from secc.ir.dialect.readable_names import ACCEPTED, LOGGED
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.ir.text_io.verifier import where
from secc.passes.loss.approximations import check, note
from secc.passes.loss.buffer_constants import with_constants
from secc.passes.loss.coefficient import ONE, SCALAR, Coefficient, Emitter
from secc.passes.loss.logged_scalars import PREFIX, logged
from secc.passes.loss.loss_context import Context
from secc.passes.loss.loss_walk import slice_of, walk
from secc.passes.loss.term_names import Names, Structure, keys, label
from secc.passes.loss.value_states import Bad, Part, Stack, State

SAMPLES = "B"
_BALANCE = "balance_loss"


@dataclass
class CaseTerms:
    """What the loss of one case is: parts that add up over samples, and parts that count once."""

    case: CaseOp
    context: Context
    parts: list[Part]
    constant: float
    logged: dict[str, list[Part]]


@dataclass(frozen=True)
class NormalizeLoss(ModulePass):
    """`accept`: approximations that the user accepts where a loss is not separable
    (`secc.passes.loss.approximations`)."""

    name = "normalize-loss"
    accept: tuple[str, ...] = ()

    def apply(self, ctx: XdslContext, op: ModuleOp) -> None:
        check(self.accept)
        graph = graph_of(op)
        open_cases = [c for c in graph.cases if c.ops[-1].operands]
        found = [_terms(case, *walk(graph, case, self.accept)) for case in open_cases]
        if accepted := dict.fromkeys(note(o) for f in found for o in f.case.ops if o in f.context.accepted):
            graph.attributes[ACCEPTED] = texts(accepted)
        if len({f.constant for f in found}) > 1:
            # A plan has one constant, so constants that differ between patterns become a term that every
            # sample has a share of.
            for f in found:
                f.parts.append(Part(Coefficient(number=f.constant)))
                f.constant = 0.0
        if notes := self._logged(found):
            graph.attributes[LOGGED] = texts(notes)
        names, structure = Names(), Structure()
        one = len({key for f in found for key in keys(f.parts)}) == 1
        coefficients = [_rewrite(f, names, structure, "loss" if one else None) for f in found]
        _same_in_a_pattern(found, coefficients)

    def _logged(self, found: list[CaseTerms]) -> list[str]:
        """Find the parts of what is logged; what is to be said of it."""
        notes: dict[str, None] = {}
        for f in found:
            f.logged, said = logged(f.context)
            notes |= dict.fromkeys(said)
        return list(notes)


def _terms(case: CaseOp, context: Context, state: State) -> CaseTerms:
    """The parts of a case's loss. Raises UserError if it is not separable."""
    if isinstance(state, Bad):
        raise UserError(state.message, where(state.op), state.remedy)
    loss = case.ops[-1].operands[0]
    parts = None if isinstance(state, Stack) or context.carries(loss) else context.parts(loss)
    if parts is None:
        raise UserError("the loss is not a scalar", _origin(loss), "let forward return one number")
    constants = [c for p in parts if p.atom is None and (c := p.coefficient.constant) is not None]
    kept = [p for p in parts if p.atom is not None or p.coefficient.constant is None]
    return CaseTerms(case, context, kept, float(sum(constants)), {})


def _origin(value: SSAValue) -> str:
    return where(value.owner) if isinstance(value.owner, Operation) else ""


def _rewrite(found: CaseTerms, names: Names, structure: Structure, only: str | None) -> dict[str, str]:
    """Put sec.term ops in the place of the loss; the coefficient of each term as a text."""
    shop, terms, written = found.context.shop, list[Operation](), dict[str, str]()
    leaves: dict[str, SSAValue] = {}
    current = ""

    def leaf(value: SSAValue) -> SSAValue:
        key = structure.value(value)
        if key not in leaves:
            name = StringAttr(names.leaf(key, current))
            scalar = with_constants(shop, _scalar(found.context, value))
            leaves[key] = shop.add(
                LeafOp.create(operands=[scalar], result_types=[SCALAR], properties={"sym": name})
            ).results[0]
        return leaves[key]

    emitter = Emitter(shop, leaf)
    for key, part in zip(keys(found.parts), found.parts, strict=True):
        current = names.term(key, only or (_BALANCE if _is_balance(found.context, part) else label(part)))
        numerator, coefficient = _numerator(found.context, part)
        values = [numerator] if coefficient == ONE else [numerator, emitter.emit(coefficient)]
        properties = {"sym": StringAttr(current)} | _place(part)
        terms.append(shop.add(TermOp.create(operands=values, properties=properties)))
        written[current] = structure.coefficient(coefficient)
    for name, parts in found.logged.items():
        for key, part in zip(keys(parts), parts, strict=True):
            current = names.term((PREFIX, name, *key), f"{PREFIX}{name}:")
            numerator, coefficient = _numerator(found.context, part)
            values = [numerator] if coefficient == ONE else [numerator, emitter.emit(coefficient)]
            terms.append(
                shop.add(
                    TermOp.create(operands=values, properties={"sym": StringAttr(current)} | _place(part))
                )
            )
    _finish(found, terms)
    return written


def _is_balance(context: Context, part: Part) -> bool:
    """Whether an approximation was accepted for what a part is made of."""
    return (
        part.atom is not None
        and not part.summed
        and bool(context.accepted)
        and not context.accepted.isdisjoint(slice_of(part.atom))
    )


def _place(part: Part) -> dict[str, StringAttr]:
    source = part.origin or (part.atom.owner if part.atom is not None else None)
    place = where(source) if isinstance(source, Operation) else ""
    return {"where": StringAttr(place)} if place else {}


def _numerator(context: Context, part: Part) -> tuple[SSAValue, Coefficient]:
    """The value that adds up over samples. What counts once for the whole batch counts 1/B for each of its B
    samples."""
    if part.summed:
        assert part.atom is not None
        return _scalar(context, part.atom), part.coefficient
    share = part.coefficient / Coefficient(size=size_expr.symbol(SAMPLES))
    if part.atom is None:
        op = GlueOp.of(
            "aten.full.default",
            [],
            f"[], {SAMPLES}, dtype=torch.float32, device=device",
            [TensorType.of([], "f32")],
        )
    else:
        type = tensor(part.atom)
        op = GlueOp.of("aten.mul.Tensor", [part.atom], f"$0, {SAMPLES}", [type])
    return _scalar(context, context.shop.add(op).results[0]), share


def _scalar(context: Context, value: SSAValue) -> SSAValue:
    """A value of one entry without dims."""
    type = tensor(value)
    if not type.dims:
        return value
    flat = TensorType.of([], type.dtype.data, type.requires_grad)
    return context.shop.add(GlueOp.of("aten.reshape.default", [value], "$0, []", [flat])).results[0]


def _finish(found: CaseTerms, terms: list[Operation]) -> None:
    found.context.shop.commit(found.case, terms)
    block = found.case.body.block
    end = block.last_op
    assert end is not None
    block.erase_op(end)
    block.add_op(ReturnOp.create(properties={"constant": StringAttr(repr(found.constant))}))


def _same_in_a_pattern(found: list[CaseTerms], coefficients: list[dict[str, str]]) -> None:
    """Captures of one pattern differ in what Python read, which a rank knows for a micro-batch only:
    coefficients may not depend on it."""
    first: dict[frozenset[str], dict[str, str]] = {}
    for f, written in zip(found, coefficients, strict=True):
        pattern = frozenset(strings(f.case.when))
        known = first.setdefault(pattern, written)
        for name in known.keys() & written.keys():
            if known[name] != written[name]:
                place = next(
                    (where(op) for op in f.case.ops if isinstance(op, TermOp) and op.sym.data == name), ""
                )
                message = f"the divisor of loss term {name} depends on what Python reads from a micro-batch (case {f.case.sym.data})"
                raise UserError(
                    message, place, "compute the divisor with tensor operations instead of Python branches"
                )
