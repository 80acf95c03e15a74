"""What every rule may ask while one case's loss is walked: states, sample dims, whether a value depends on
inputs alone, coefficients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import sympy
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.errors import UserError
from secc.ir.analysis.dataflow import is_random, producer
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, ConstOp, GlueOp, GraphOp, InputOp, ParamOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.ir.text_io.verifier import where
from secc.passes.loss.buffer_constants import is_known
from secc.passes.loss.coefficient import ONE, Applied, Coefficient, Given, Leaf, of_factor, total
from secc.passes.loss.pending_ops import Workshop, argument
from secc.passes.loss.value_states import Bad, Local, Part, Stack, State, Sum

WIDTH, DATA = "width", "data"
COUNT = TensorType.of([], "i64")
NOT_SEPARABLE = "the loss is not separable by sample: "
REMEDY = "let the loss be a sum or mean over samples of what each sample gives alone"


class Context:
    """Facts about one case, and the states found so far."""

    def __init__(self, graph: GraphOp, case: CaseOp, accept: Collection[str] = ()) -> None:
        self.graph, self.case, self.shop = graph, case, Workshop()
        self.accept, self.accepted = (
            frozenset(accept),
            set[Operation](),
        )  # approximations, and the ops that one was taken for
        self.states: dict[SSAValue, State] = {}
        kinds = {name: op.kind.data for name, op in graph.symbols.items()}
        self.sample_symbols = {name for name, kind in kinds.items() if kind != WIDTH}
        self.data_symbols = {name for name, kind in kinds.items() if kind == DATA}
        self._rows: dict[str, SSAValue] = {}
        self.inputs_alone: set[SSAValue] = set()
        self.given: set[SSAValue] = set()
        for op in case.ops:
            self._classify(op)

    def _classify(self, op: Operation) -> None:
        """Record whether results depend on inputs and constants alone, and whether they depend on no input at
        all."""
        pure = (
            isinstance(op, InputOp | ConstOp)
            or is_known(op)
            or (isinstance(op, GlueOp) and not is_random(op))
        )
        if pure and all(o in self.inputs_alone for o in op.operands):
            self.inputs_alone.update(op.results)
            if not isinstance(op, InputOp | ParamOp) and all(o in self.given for o in op.operands):
                self.given.update(op.results)

    def drawn(self, value: SSAValue) -> bool:
        """Whether a value comes from inputs and random numbers alone."""
        queue, seen = [value], set[SSAValue]()
        while queue:
            op = producer(queue.pop())
            if isinstance(op, CallOp | ParamOp):
                return False
            queue += [o for o in op.operands if o not in seen]
            seen.update(op.operands)
        return not self.input_only(value)

    def input_only(self, value: SSAValue) -> bool:
        """Whether a value depends on inputs and constants alone."""
        owner = value.owner
        if value in self.inputs_alone or not isinstance(owner, GlueOp) or owner.parent is not None:
            return value in self.inputs_alone
        if all(self.input_only(o) for o in owner.operands):  # made here, not yet classified
            self._classify(owner)
        return value in self.inputs_alone

    def samples(self, type: TensorType) -> list[int]:
        """The dims of a tensor that carry samples."""
        return [
            i for i, dim in enumerate(type.shape) if {str(s) for s in dim.free_symbols} & self.sample_symbols
        ]

    def carries(self, value: SSAValue) -> bool:
        """Whether a value has a dim that carries samples."""
        return bool(self.samples(tensor(value)))

    def state(self, value: SSAValue) -> State:
        """The state of a value; atoms made while walking are Local."""
        return self.states.get(value, Local())

    def parts(self, value: SSAValue) -> tuple[Part, ...] | None:
        """A value as a sum of parts; None where it is not one."""
        match self.state(value):
            case Local(parts=()):
                return (Part(ONE, value),)
            case Local(parts=parts) | Sum(parts=parts):
                return parts
            case _:
                return None

    def plain(self, value: SSAValue) -> bool:
        """Whether a value may be used as it is in an op that is not linear."""
        state = self.state(value)
        if isinstance(state, Local):
            return True
        # Integers made from inputs are bookkeeping (positions, offsets); what they select stays with its
        # sample.
        return self.input_only(value) and self.carries(value) and not floating(tensor(value))

    def coefficient(self, value: SSAValue) -> Coefficient | None:
        """A one-entry value as a coefficient, if it depends on inputs and sizes alone and adds up over
        samples or is made from no input."""
        if not one_entry(tensor(value)):
            return None
        state = self.state(value)
        if isinstance(state, Bad | Stack):
            return None
        found = [self.part_coefficient(p) for p in self.parts(value) or ()]
        return total([c for c in found if c is not None]) if found and None not in found else None

    def part_coefficient(self, part: Part) -> Coefficient | None:
        """A part as a coefficient, where its atom is one entry known before any forward."""
        if part.atom is None:
            return part.coefficient
        if not one_entry(tensor(part.atom)) or not self.input_only(part.atom):
            return None
        if part.summed:
            return part.coefficient * of_factor(Leaf(part.atom))
        return part.coefficient * of_factor(Given(part.atom)) if part.atom in self.given else None

    def applied(self, op: Computation) -> Coefficient | None:
        """An op on coefficients as a coefficient."""
        operands = [self.coefficient(o) for o in op.operands]
        if (
            not isinstance(op, GlueOp)
            or len(op.results) != 1
            or not one_entry(tensor(op.results[0]))
            or is_random(op)
        ):
            return None
        known = tuple(o for o in operands if o is not None)
        return of_factor(Applied(op, known)) if len(known) == len(operands) else None

    def literal(self, value: Any) -> float | None:
        """The number that an argument is or that a tensor made of Python data holds, in all of its
        entries."""
        owner = value.owner if isinstance(value, SSAValue) else None
        if isinstance(owner, ConstOp):
            text = owner.attributes.get("value")
            return float(text.data) if isinstance(text, StringAttr) else None
        if isinstance(owner, GlueOp) and owner.base.removeprefix("new_").removesuffix("_like") == "zeros":
            return 0.0
        if isinstance(owner, GlueOp) and owner.base in {"scalar_tensor", "full"}:
            value = argument(owner, owner.base == "full", "fill_value")
        return float(value) if isinstance(value, int | float) else None

    def entries(self, type: TensorType, dims: Iterable[int]) -> Coefficient:
        """The number of entries in some dims, over the whole global batch."""
        size = sympy.Mul(*(type.shape[d] for d in dims))
        if not {str(s) for s in size.free_symbols} & self.data_symbols:
            return Coefficient(size=size)
        return total([self._monomial(term) for term in sympy.Add.make_args(sympy.expand(size))])

    def _monomial(self, term: Expr) -> Coefficient:
        """A product of sizes, where a number of rows that the inputs' values decide is counted by a leaf."""
        counted = {s: n for s, n in term.as_powers_dict().items() if str(s) in self.data_symbols}
        found = Coefficient(size=term / sympy.Mul(*(s**n for s, n in counted.items())))
        for symbol, power in counted.items():
            factor = Leaf(self.rows(str(symbol)))
            for _ in range(int(power)):
                found = found * of_factor(factor)
        return found

    def rows(self, symbol: str) -> SSAValue:
        """The number of rows that a mask selects, as an input-only scalar. Raises UserError where inputs
        alone do not decide it."""
        if symbol not in self._rows:
            self._rows[symbol] = count_rows(self, symbol)
        return self._rows[symbol]

    def moves(self, coefficient: Coefficient) -> bool:
        """Whether a coefficient differs between a micro-batch and the whole batch because more samples are in
        it."""
        return bool(coefficient.factors) or bool(
            {str(s) for s in coefficient.size.free_symbols} & self.sample_symbols
        )

    def bad(self, op: Operation, why: str, remedy: str = REMEDY) -> Bad:
        """The state of a value that `op` makes by mixing samples."""
        target = op.properties.get("target")
        name = getattr(target, "data", op.name)
        return Bad(f"{NOT_SEPARABLE}{name} {why}", op, remedy)


def floating(type: TensorType) -> bool:
    """Whether entries are real or complex numbers, not integers or booleans."""
    return type.dtype.data[0] in "fcb" and type.dtype.data != "bool"


def one_entry(type: TensorType) -> bool:
    """Whether a tensor has exactly one entry, whatever the sizes."""
    return all(d == 1 for d in type.shape)


def count_rows(ctx: Context, symbol: str) -> SSAValue:
    """The number that a data symbol stands for: the sum of the mask that selects its rows, or the length of
    what inputs select."""
    for op in ctx.case.ops:
        if not isinstance(op, GlueOp):
            continue
        masks = [o for o in op.operands[1:] if tensor(o).dtype.data == "bool" and ctx.input_only(o)]
        selected = op.base in {"index", "masked_select"} and any(
            str(d) == symbol for d in tensor(op.results[0]).shape
        )
        if selected and len(masks) == 1 == len(op.operands) - 1:
            return ctx.shop.glue(op, "aten.sum.default", masks, "$0", COUNT)
        for result in op.results:
            if ctx.input_only(result) and symbol in map(str, tensor(result).shape):
                return _length(ctx, op, result, symbol)
    place = next(
        (where(op) for op in ctx.case.ops if any(symbol in map(str, tensor(r).shape) for r in op.results)), ""
    )
    message = (
        "the loss is not separable by sample: it divides by a number of rows that a block's result decides"
    )
    raise UserError(message, place, "select rows by a mask made of inputs alone")


def _length(ctx: Context, op: GlueOp, value: SSAValue, symbol: str) -> SSAValue:
    """The length of the dim of a value whose size is `symbol`."""
    type = tensor(value)
    while len(type.dims) > 1:
        dim = next(d for d, size in enumerate(type.shape) if str(size) != symbol)
        type = TensorType.of([s for d, s in enumerate(type.shape) if d != dim], type.dtype.data)
        value = ctx.shop.glue(op, "aten.select.int", [value], f"$0, {dim}, 0", type)
    ones = ctx.shop.glue(
        op, "aten.ones_like.default", [value], "$0, dtype=torch.int64", TensorType.of(type.shape, "i64")
    )
    return ctx.shop.glue(op, "aten.sum.default", [ones], "$0", COUNT)
