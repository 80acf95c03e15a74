"""Questions that passes ask about a case: where a value comes from, which values a gradient reaches, what
attributes say, and how large a value is for the dataset's samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntAttr, IntegerAttr, StringAttr
from xdsl.ir import Attribute, Operation, OpResult, SSAValue

from secc.ir.analysis.recorded_glue import FALLBACK_ATTRIBUTE
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import (
    CallOp,
    CaseOp,
    Computation,
    ConstOp,
    GlueOp,
    GraphOp,
    InputOp,
    LeafOp,
    PatternOp,
    ReturnOp,
    SizeOp,
    TermOp,
    TransferOp,
    strings_of,
)
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type

SECTION_MODES = ("forward", "dgrad", "train")
_GRADIENT_STOPS = ("aten.detach.default", "aten.detach_copy.default")
_RANDOM_OPS = (
    "rand",
    "bernoulli",
    "native_dropout",
    "dropout",
    "normal",
    "uniform",
    "multinomial",
    "exponential",
    "poisson",
    "cauchy",
    "geometric",
    "log_normal",
)


class ValueOrigin(Enum):
    """The source of a value: the batch and constants alone, the whole global batch (leaves, sizes), or the
    model."""

    INPUT = "input"
    GLOBAL = "global"
    MODEL = "model"


def classify_origins(case: CaseOp) -> dict[SSAValue, ValueOrigin]:
    """The origin of every value of a case. Random ops count as the model's, as no guard is made from them;
    those that leaves have for themselves count as inputs."""
    found: dict[SSAValue, ValueOrigin] = {}
    behind_leaves = _random_ops_behind_leaves(case)
    for op in case.ops:
        operands = {found[o] for o in op.operands}
        match op:
            case InputOp() | ConstOp():
                origin = ValueOrigin.INPUT
            case LeafOp() | SizeOp():
                origin = ValueOrigin.GLOBAL
            case GlueOp() | TransferOp() if (
                not is_random_op(op) or op in behind_leaves
            ) and ValueOrigin.MODEL not in operands:
                origin = ValueOrigin.GLOBAL if ValueOrigin.GLOBAL in operands else ValueOrigin.INPUT
            case _:
                origin = ValueOrigin.MODEL
        found |= dict.fromkeys(op.results, origin)
    return found


def _random_ops_behind_leaves(case: CaseOp) -> set[Operation]:
    """The random ops that leaves depend on."""
    found, seen = set[Operation](), set[Operation]()
    stack = [producer_of(op.value) for op in case.ops if isinstance(op, LeafOp)]
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack += [producer_of(o) for o in op.operands]
            found |= {op} if is_random_op(op) else set()
    return found


def find_gradient_values(case: CaseOp) -> set[SSAValue]:
    """The values of a case that a gradient of the loss reaches, found by walking backwards from the loss and
    its terms."""
    wanted: set[SSAValue] = set()
    for op in reversed(case.ops):
        wanted.update(find_gradient_operands(op, wanted))
    return wanted


def find_gradient_operands(op: Operation, wanted: Collection[SSAValue]) -> list[SSAValue]:
    """The operands of an op that get a gradient from it; `wanted` has its results that a gradient of the loss
    reaches."""
    match op:
        case ReturnOp() | TermOp():
            taken = list(op.operands)
        case Computation() if "no_grad" not in op.properties and any(r in wanted for r in op.results):
            target = op.properties["target"]
            stops = isinstance(target, StringAttr) and target.data in _GRADIENT_STOPS
            taken = [] if stops else list(op.operands)
        case _:
            return []
    return [value for value in taken if tensor_type(value).requires_grad]


def is_random_op(op: Operation) -> bool:
    """Whether an op draws random numbers."""
    return isinstance(op, GlueOp) and op.target.data.removeprefix("aten.").startswith(_RANDOM_OPS)


def producer_of(value: SSAValue) -> Operation:
    """The op that produces a value. Cases have no block arguments, so every value has one."""
    assert isinstance(value, OpResult)
    return value.owner


def users_of(op: Operation) -> list[Operation]:
    """The ops that use a result of `op`, each once, in the order of the case."""
    found = {use.operation for result in op.results for use in result.uses}
    block = op.parent_block()
    assert block is not None
    return [o for o in block.ops if o in found] if len(found) > 1 else list(found)


def get_strings(op: Operation, name: str) -> tuple[str, ...]:
    """The texts in the list kept as property or attribute `name`, () where there is none."""
    found = op.get_attr_or_prop(name)
    return tuple(a.data for a in found if isinstance(a, StringAttr)) if isinstance(found, ArrayAttr) else ()


AnyAttribute = TypeVar("AnyAttribute", bound=Attribute)


def get_values(op: Operation, name: str, kind: type[AnyAttribute]) -> tuple[AnyAttribute, ...]:
    """The attributes of class `kind` in the list kept as property or attribute `name`, () where there is
    none."""
    found = op.get_attr_or_prop(name)
    return tuple(a for a in found if isinstance(a, kind)) if isinstance(found, ArrayAttr) else ()


def get_string(op: Operation, name: str) -> str | None:
    """The text kept as property or attribute `name`, None where there is none."""
    found = op.get_attr_or_prop(name)
    return found.data if isinstance(found, StringAttr) else None


def get_number(op: Operation, name: str) -> float | None:
    """The number kept as property or attribute `name`, None where there is none."""
    match op.get_attr_or_prop(name):
        case IntAttr(data=number):
            return number
        case IntegerAttr() | FloatAttr() as attribute:
            return attribute.value.data
        case _:
            return None


def strongest_mode(modes: Iterable[str]) -> str:
    """The mode that includes all others: train before dgrad before forward."""
    return max(modes, key=SECTION_MODES.index, default="forward")


def call_mode(op: Operation) -> str:
    """The mode of a call, "train" before `infer-modes` has run."""
    return get_string(op, "mode") or "train"


class SampleStatistics:
    """Means over the dataset's samples, from the `sec.pattern` ops. A graph without them counts every
    captured case equally, with all sizes 1."""

    def __init__(self, graph: GraphOp) -> None:
        self._symbols, self._abouts = list(graph.symbols), size_estimates(graph)
        self._weights: list[tuple[CaseOp, float, dict[str, float]]] = []
        self._means: dict[tuple[CaseOp, Expr | int], float] = {}  # most values are of few types
        cases = [c for c in graph.cases if FALLBACK_ATTRIBUTE not in c.attributes]
        for case in cases:
            same_pattern = sum(set(strings_of(c.when)) == set(strings_of(case.when)) for c in cases)
            for share, sizes in self._samples_of_case(graph, case):
                self._weights.append((case, share / same_pattern, sizes))

    def _samples_of_case(self, graph: GraphOp, case: CaseOp) -> list[tuple[float, dict[str, float]]]:
        if not graph.patterns:
            return [(1 / len(graph.cases), dict.fromkeys(self._symbols, 1.0))]
        same = [p for p in graph.patterns if set(strings_of(p.when)) == set(strings_of(case.when))]
        return [(float(p.share.data), self._pattern_sizes(p)) for p in same]

    def _pattern_sizes(self, pattern: PatternOp) -> dict[str, float]:
        sizes = {name: get_number(pattern, name) or 0.0 for name in self._symbols}
        return sizes | {name: evaluate_at_means(about, sizes) for name, about in self._abouts.items()}

    def mean(self, size: Callable[[CaseOp], Expr | int]) -> float:
        """The mean over samples of `size`, which gives for each case an expression over a sample's sizes."""
        return sum(share * evaluate_at_means(size(case), sizes) for case, share, sizes in self._weights)

    def mean_in_case(self, case: CaseOp, size: Expr | int) -> float:
        """The contribution of one case to the mean over samples: the share of its samples times `size` at
        their mean sizes."""
        if (case, size) not in self._means:
            self._means[case, size] = sum(
                share * evaluate_at_means(size, sizes) for c, share, sizes in self._weights if c is case
            )
        return self._means[case, size]


def size_estimates(graph: GraphOp) -> dict[str, Expr]:
    """Estimates of the sizes that values of the inputs decide, as expressions over other sizes, without
    rounding."""
    found = {name: s.about.data for name, s in graph.symbols.items() if s.about is not None}
    return {name: size_expr.remove_rounding(size_expr.parse_expr(text)) for name, text in found.items()}


def evaluate_at_means(size: Expr | int, sizes: Mapping[str, float]) -> float:
    """The value of an expression at mean sizes, which need not be integers."""
    return float(size_expr.evaluate_size(size, sizes))  # pyright: ignore[reportArgumentType]


def value_bytes(value: SSAValue) -> Expr:
    """The bytes of a value as an expression over sizes."""
    return _tensor_bytes(tensor_type(value))


@lru_cache(1 << 12)
def _tensor_bytes(kind: TensorType) -> Expr:
    total = size_expr.parse_expr(str(kind.itemsize))
    for dim in kind.shape:
        total = total * dim
    return total


def call_flops(call: CallOp) -> Expr | None:
    """The forward FLOPs of a call as an expression over sizes, None before they are measured."""
    text = get_string(call, "flops")
    return None if text is None else size_expr.parse_expr(text)
