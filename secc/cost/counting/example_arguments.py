"""Values of integer tensors that inputs alone decide, at samples of the dataset: what blocks read that loop
over samples or images.

The input-only ops of a case are run with torch on collated samples; what depends on a parameter or on a
block's result has no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from xdsl.ir import Operation, SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.argument_template import DottedName, OperandRef
from secc.ir.dialect.ops import CallOp, CaseOp, ConstOp, GlueOp, GraphOp, InputOp, strings_of

OperandValues = Mapping[SSAValue, torch.Tensor]
NO_VALUES: OperandValues = MappingProxyType({})
MAX_EXAMPLES = 5  # samples that a block is tried at


@dataclass(frozen=True)
class CollatedSamples:
    """Samples of the dataset, collated one by one, and the tensors that forward makes of Python data."""

    batches: Sequence[Mapping[str, Any]]
    constants: Mapping[str, torch.Tensor]


NO_SAMPLES = CollatedSamples((), MappingProxyType({}))


@dataclass(frozen=True)
class CallExample:
    """The sizes of one sample, and the values that its inputs decide."""

    sizes: Mapping[str, int]
    values: OperandValues


class CallExamples:
    """Samples, collated one by one, as arguments of calls."""

    def __init__(self, graph: GraphOp, samples: CollatedSamples) -> None:
        self._graph, self._batches, self._constants = graph, samples.batches, samples.constants
        self._optional = set(strings_of(graph.optional))

    def examples_of_call(self, case: CaseOp, call: CallOp) -> Iterator[CallExample]:
        """The call's integer arguments at samples of the case's pattern."""
        for batch in [b for b in self._batches if self._optional & b.keys() == set(strings_of(case.when))][
            :MAX_EXAMPLES
        ]:
            sizes = {name: self._symbol_value(batch, name) for name in self._graph.symbols}
            yield CallExample(sizes, compute_operand_values(call, batch, sizes, self._constants))

    def _symbol_value(self, batch: Mapping[str, Any], name: str) -> int:
        symbol = self._graph.symbols[name]
        key = symbol.key.data
        return (batch[key].shape[symbol.dim.data] if key in batch else 0) if key else 1


def compute_operand_values(
    call: CallOp, batch: Mapping[str, Any], sizes: Mapping[str, int], constants: Mapping[str, torch.Tensor]
) -> OperandValues:
    """Computed backwards from the call, so that nothing else runs."""
    known: dict[SSAValue, torch.Tensor | None] = {}

    def value(of: SSAValue) -> torch.Tensor | None:
        if of not in known:
            known[of] = None
            if isinstance(of.owner, Operation):
                for result, made in zip(of.owner.results, _run(of.owner), strict=False):
                    known[result] = made
        return known[of]

    def _run(op: Operation) -> Sequence[torch.Tensor | None]:
        match op:
            case InputOp():
                return [batch[op.key.data]]
            case ConstOp():
                return [constants.get(op.key.data)]
            case GlueOp():
                operands = [value(o) for o in op.operands]
                return [] if any(o is None for o in operands) else _run_glue(op, operands, sizes)
            case _:
                return []

    found = {o: value(o) for o in call.operands}
    return {o: v for o, v in found.items() if v is not None and not v.is_floating_point()}


def _run_glue(op: GlueOp, operands: Sequence[Any], sizes: Mapping[str, int]) -> Sequence[torch.Tensor]:
    def leaf(found: Any) -> Any:
        match found:
            case OperandRef(index=index):
                return operands[index]
            case DottedName(text="device"):
                return torch.device("cpu")
            case DottedName(text=text):
                return getattr(torch, text.removeprefix("torch."))
            case sympy.Expr():
                return size_expr.evaluate_expr(found, sizes)
            case _:
                return found

    made = op.arguments.map_leaves(leaf)
    function: Any = torch.ops
    for part in op.target.data.split("."):
        function = getattr(function, part)
    result = function(*made.args, **made.kwargs)
    return result if isinstance(result, tuple | list) else [result]
