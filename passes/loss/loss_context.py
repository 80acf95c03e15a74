"""The facts that rules may use while the loss of one case is followed: states, sample dims, whether a value
depends on inputs alone, coefficients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import sympy
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from secc.errors import UserError
from secc.ir.analysis.dataflow import is_random_op, producer_of
from secc.ir.analysis.recorded_glue import recorded_label
from secc.ir.analysis.whole_batch import find_named_blocks
from secc.ir.dialect.ops import CallOp, CaseOp, Computation, ConstOp, GlueOp, GraphOp, InputOp, ParamOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.ir.text_io.verifier import source_line
from secc.passes.loss.buffer_constants import is_known_buffer
from secc.passes.loss.coefficient import (
    UNIT_COEFFICIENT,
    AppliedFactor,
    Coefficient,
    GivenFactor,
    LeafFactor,
    coefficient_of_factor,
    sum_coefficients,
)
from secc.passes.loss.pending_ops import PendingOps, get_argument
from secc.passes.loss.value_states import (
    BadState,
    GatheredRows,
    LocalState,
    PickedEntries,
    ReadStatistic,
    StackState,
    StatisticUse,
    SumPart,
    SumState,
    ValueState,
)

WIDTH_KIND, DATA_KIND = "width", "data"
COUNT_TYPE = TensorType.from_dims([], "i64")
STATISTIC_TARGET = "batch.statistic"  # glue that `SectionModule.statistic` computes
WHOLE_BATCH_MODULE = (
    "put the lines that work on all samples into an nn.Module of their own that returns rows, and name it"
    " with --whole-batch: it then takes all samples of a step at once"
)
DEFAULT_REMEDY = "let the loss be a sum or mean over samples of what each sample gives alone"


class LossContext:
    """Facts about one case, and the states found so far."""

    def __init__(
        self,
        graph: GraphOp,
        case: CaseOp,
        accept: Collection[str] = (),
        statistics: StatisticUse = StatisticUse.NONE,
        gather: Iterable[str] = (),
        collects_names: bool = False,
        whole_batch: Iterable[str] = (),
    ) -> None:
        self.graph, self.case, self.pending = graph, case, PendingOps()
        self.statistic_use = statistics  # which sums over the global batch may be read
        self.statistics: list[ReadStatistic] = []
        self.gather = tuple(gather)  # blocks with rows that may be gathered over the global batch
        self.collects_names = collects_names  # whether rows of other blocks are gathered, to name all of them
        self.unnamed: list[tuple[BadState, str]] = []  # ops that need them, and the blocks
        self.gathers: list[GatheredRows] = []
        # Blocks that take all samples of a step at once, and those of them with results that are one value of
        # all samples.
        self.whole_batch = frozenset(path for name in whole_batch for path in find_named_blocks(graph, name))
        self.reducing: set[str] = set()
        self.whole: set[SSAValue] = set()  # values that are computed from rows of the global batch
        self.whole_versions: dict[SSAValue, SSAValue] = {}  # of values of a micro-batch
        self.accept, self.accepted = (
            frozenset(accept),
            set[Operation](),
        )  # approximations, and the ops that one was taken for
        self.states: dict[SSAValue, ValueState] = {}
        self.picked: dict[SSAValue, PickedEntries] = {}
        kinds = {name: op.kind.data for name, op in graph.symbols.items()}
        self.width_symbols = {name for name, kind in kinds.items() if kind == WIDTH_KIND}
        self.data_symbols = {name for name, kind in kinds.items() if kind == DATA_KIND}
        row_symbols = {name for name, kind in kinds.items() if kind != WIDTH_KIND}
        self.padded_lengths = _padded_lengths(case, row_symbols - self.data_symbols, self.data_symbols)
        self.sample_symbols = row_symbols - self.padded_lengths
        self._rows: dict[str, SSAValue] = {}
        self.input_only_values: set[SSAValue] = set()
        self.given_values: set[SSAValue] = set()
        for op in case.ops:
            self._classify(op)

    def _classify(self, op: Operation) -> None:
        """Record whether results depend on inputs and constants alone, and whether they depend on no input at
        all."""
        pure = (
            isinstance(op, InputOp | ConstOp)
            or is_known_buffer(op)
            or (isinstance(op, GlueOp) and not is_random_op(op) and op.target.data != STATISTIC_TARGET)
        )
        if pure and all(o in self.input_only_values for o in op.operands):
            self.input_only_values.update(op.results)
            if not isinstance(op, InputOp | ParamOp) and all(o in self.given_values for o in op.operands):
                self.given_values.update(op.results)

    def case_computations(self) -> list[Computation]:
        """The calls and glue of the case."""
        return [op for op in self.case.ops if isinstance(op, Computation)]

    def is_random_of_inputs(self, value: SSAValue) -> bool:
        """Whether a value depends on inputs and random numbers alone."""
        queue, seen = [value], set[SSAValue]()
        while queue:
            op = producer_of(queue.pop())
            if isinstance(op, CallOp | ParamOp):
                return False
            queue += [o for o in op.operands if o not in seen]
            seen.update(op.operands)
        return not self.is_input_only(value)

    def is_known_ahead(self, value: SSAValue) -> bool:
        """Whether a value is known before any block runs: it depends on inputs, constants and random numbers
        alone, by ops that are the same for all batches."""
        known = self.is_input_only(value) or self.is_random_of_inputs(value)
        return known and not is_rerecorded(value)

    def is_input_only(self, value: SSAValue) -> bool:
        """Whether a value depends on inputs and constants alone."""
        owner = value.owner
        if value in self.input_only_values or not isinstance(owner, GlueOp) or owner.parent is not None:
            return value in self.input_only_values
        if all(self.is_input_only(o) for o in owner.operands):  # made here, not yet classified
            self._classify(owner)
        return value in self.input_only_values

    def sample_dims(self, type: TensorType) -> list[int]:
        """The dims of a tensor that grow with the samples."""
        return [
            i for i, dim in enumerate(type.shape) if {str(s) for s in dim.free_symbols} & self.sample_symbols
        ]

    def has_padded_dim(self, type: TensorType) -> bool:
        """Whether a tensor has a dim that grows with the padding of a batch."""
        return any({str(s) for s in dim.free_symbols} & self.width_symbols for dim in type.shape)

    def carries_samples(self, value: SSAValue) -> bool:
        """Whether a value has a dim that grows with the samples."""
        return bool(self.sample_dims(tensor_type(value)))

    def state_of(self, value: SSAValue) -> ValueState:
        """The state of a value; values created on the way are local."""
        return self.states.get(value, LocalState())

    def parts_of(self, value: SSAValue) -> tuple[SumPart, ...] | None:
        """A value as a sum of parts; None where it is not one."""
        match self.state_of(value):
            case LocalState(parts=()):
                return (SumPart(UNIT_COEFFICIENT, value),)
            case LocalState(parts=parts) | SumState(parts=parts):
                return parts
            case _:
                return None

    def is_plain(self, value: SSAValue) -> bool:
        """Whether an op that is not linear may use a value as it is."""
        state = self.state_of(value)
        if isinstance(state, LocalState):
            return True
        # Integers made from inputs are bookkeeping (positions, offsets); what they select stays with its
        # sample.
        return (
            self.is_input_only(value) and self.carries_samples(value) and not tensor_type(value).is_floating
        )

    def coefficient_of(self, value: SSAValue) -> Coefficient | None:
        """A one-entry value as a coefficient, if it depends on inputs and sizes alone and adds up over
        samples, or depends on no input."""
        if not has_one_entry(tensor_type(value)):
            return None
        state = self.state_of(value)
        if isinstance(state, BadState | StackState):
            return None
        return self.coefficient_of_parts(self.parts_of(value) or ())

    def coefficient_of_parts(self, parts: Iterable[SumPart]) -> Coefficient | None:
        """A sum of parts as a coefficient, where all of them are one."""
        found = [self.coefficient_of_part(p) for p in parts]
        return sum_coefficients([c for c in found if c is not None]) if found and None not in found else None

    def coefficient_of_part(self, part: SumPart) -> Coefficient | None:
        """A part as a coefficient, where its atom is one entry that is known before any forward."""
        if part.atom is None:
            return part.coefficient
        if not has_one_entry(tensor_type(part.atom)) or not self.is_known_ahead(part.atom):
            return None
        if part.summed:
            return part.coefficient * coefficient_of_factor(LeafFactor(part.atom))
        return (
            part.coefficient * coefficient_of_factor(GivenFactor(part.atom))
            if part.atom in self.given_values
            else None
        )

    def apply_to_coefficients(self, op: Computation) -> Coefficient | None:
        """An op on coefficients as a coefficient; None where an operand is none."""
        operands = [self.coefficient_of(o) for o in op.operands]
        if (
            not isinstance(op, GlueOp)
            or len(op.results) != 1
            or not has_one_entry(tensor_type(op.results[0]))
            or is_random_op(op)
        ):
            return None
        known = tuple(o for o in operands if o is not None)
        return coefficient_of_factor(AppliedFactor(op, known)) if len(known) == len(operands) else None

    def literal_value(self, value: Any) -> float | None:
        """The number of an argument, or of a tensor from Python data that holds it in all entries; None for
        anything else."""
        owner = value.owner if isinstance(value, SSAValue) else None
        if isinstance(owner, ConstOp):
            text = owner.attributes.get("value")
            return float(text.data) if isinstance(text, StringAttr) else None
        if (
            isinstance(owner, GlueOp)
            and owner.base_name.removeprefix("new_").removesuffix("_like") == "zeros"
        ):
            return 0.0
        if isinstance(owner, GlueOp) and owner.base_name in {"scalar_tensor", "full"}:
            value = get_argument(owner, owner.base_name == "full", "fill_value")
        return float(value) if isinstance(value, int | float) else None

    def entry_count(self, type: TensorType, dims: Iterable[int]) -> Coefficient:
        """The number of entries in some dims, over the whole global batch."""
        size = sympy.Mul(*(type.shape[d] for d in dims))
        if not {str(s) for s in size.free_symbols} & self.data_symbols:
            return Coefficient(size=size)
        return sum_coefficients(
            [self._coefficient_of_monomial(term) for term in sympy.Add.make_args(sympy.expand(size))]
        )

    def _coefficient_of_monomial(self, term: Expr) -> Coefficient:
        """A product of sizes, where a number of rows that the inputs' values decide is counted by a leaf."""
        counted = {s: n for s, n in term.as_powers_dict().items() if str(s) in self.data_symbols}
        if padded := {str(s) for s in counted} & self.padded_lengths:
            raise _padded_length_error(self, min(padded))
        found = Coefficient(size=term / sympy.Mul(*(s**n for s, n in counted.items())))
        for symbol, power in counted.items():
            factor = LeafFactor(self.selected_row_count(str(symbol)))
            for _ in range(int(power)):
                found = found * coefficient_of_factor(factor)
        return found

    def selected_row_count(self, symbol: str) -> SSAValue:
        """The number of rows that a mask selects, as an input-only scalar. Raises UserError where inputs
        alone do not determine it."""
        if symbol not in self._rows:
            self._rows[symbol] = count_rows(self, symbol)
        return self._rows[symbol]

    def depends_on_batch(self, coefficient: Coefficient) -> bool:
        """Whether a coefficient differs between a micro-batch and the whole batch because that has more
        samples."""
        return bool(coefficient.factors) or bool(
            {str(s) for s in coefficient.size.free_symbols} & self.sample_symbols
        )

    def refuse_op(self, op: Operation, why: str, remedy: str = DEFAULT_REMEDY) -> BadState:
        """The bad state of a value for which `op` mixes samples."""
        target = op.properties.get("target")
        name = getattr(target, "data", op.name)
        return BadState(f"{name} {why}", op, remedy)


def is_rerecorded(value: SSAValue) -> bool:
    """Whether a value comes from ops that are recorded again for each micro-batch."""
    queue, seen = [value], {value}
    while queue:
        op = queue.pop().owner
        if isinstance(op, Operation):
            if recorded_label(op) is not None:
                return True
            queue += [o for o in op.operands if o not in seen]
            seen.update(op.operands)
    return False


def _padded_lengths(case: CaseOp, rows: set[str], data: set[str]) -> set[str]:
    """The data symbols that are lengths of padded rows, not numbers of them: dims of glue that is recorded
    for each micro-batch, behind a dim that counts its samples' rows."""
    found = set[str]()
    for op in case.ops:
        if isinstance(op, GlueOp) and recorded_label(op) is not None:
            first, *others = [{str(s) for s in d.free_symbols} for d in tensor_type(op.results[0]).shape] or [
                set()
            ]
            if first & rows:
                found |= set[str]().union(*others) & data
    return found


def _padded_length_error(ctx: LossContext, symbol: str) -> UserError:
    place = next(
        (
            source_line(op)
            for op in ctx.case.ops
            if any(symbol in map(str, tensor_type(r).shape) for r in op.results)
        ),
        "",
    )
    return UserError(
        "the loss is not separable by sample: it divides by a padded length that other samples decide",
        place,
        "divide by the number of entries that count, or join the samples' parts by torch.cat",
    )


def has_one_entry(type: TensorType) -> bool:
    """Whether a tensor has exactly one entry, for all sizes."""
    return all(d == 1 for d in type.shape)


def count_rows(ctx: LossContext, symbol: str) -> SSAValue:
    """The number that a data symbol stands for: the sum of the mask that selects its rows, or the length of a
    selection from inputs. Raises UserError where inputs alone do not determine it."""
    for op in ctx.case.ops:
        if not isinstance(op, GlueOp):
            continue
        masks = [o for o in op.operands[1:] if tensor_type(o).dtype.data == "bool" and ctx.is_known_ahead(o)]
        selected = op.base_name in {"index", "masked_select"} and any(
            str(d) == symbol for d in tensor_type(op.results[0]).shape
        )
        if selected and len(masks) == 1 == len(op.operands) - 1:
            return ctx.pending.make_glue(op, "aten.sum.default", masks, "$0", COUNT_TYPE)
        for result in op.results:
            if ctx.is_input_only(result) and symbol in map(str, tensor_type(result).shape):
                return _count_length(ctx, op, result, symbol)
    place = next(
        (
            source_line(op)
            for op in ctx.case.ops
            if any(symbol in map(str, tensor_type(r).shape) for r in op.results)
        ),
        "",
    )
    message = (
        "the loss is not separable by sample: it divides by a number of rows that a block's result decides"
    )
    raise UserError(message, place, "select rows by a mask made of inputs alone")


def _count_length(ctx: LossContext, op: GlueOp, value: SSAValue, symbol: str) -> SSAValue:
    """The length of a value's dim of size `symbol`."""
    type = tensor_type(value)
    while len(type.dims) > 1:
        dim = next(d for d, size in enumerate(type.shape) if str(size) != symbol)
        type = TensorType.from_dims([s for d, s in enumerate(type.shape) if d != dim], type.dtype.data)
        value = ctx.pending.make_glue(op, "aten.select.int", [value], f"$0, {dim}, 0", type)
    ones = ctx.pending.make_glue(
        op,
        "aten.ones_like.default",
        [value],
        "$0, dtype=torch.int64",
        TensorType.from_dims(type.shape, "i64"),
    )
    return ctx.pending.make_glue(op, "aten.sum.default", [ones], "$0", COUNT_TYPE)
