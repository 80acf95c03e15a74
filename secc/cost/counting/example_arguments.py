"""Values of integer arguments at samples of the dataset, for blocks that loop over samples or images.

The operations of a case that depend on inputs alone run with torch on collated samples. What depends on a
parameter or on the result of a block has no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from xdsl.ir import Operation, SSAValue

from secc.ir.analysis.recorded_glue import recorded_label
from secc.ir.analysis.run_glue import run_glue
from secc.ir.dialect.ops import CallOp, CaseOp, ConstOp, GlueOp, GraphOp, InputOp, strings_of

OperandValues = Mapping[SSAValue, torch.Tensor]
NO_VALUES: OperandValues = MappingProxyType({})
MAX_EXAMPLES = 5  # samples at which a block is measured


@dataclass(frozen=True)
class CollatedSamples:
    """Dataset samples, each collated alone (`batches`), and tensors that forward creates from Python data
    (`constants`)."""

    batches: Sequence[Mapping[str, Any]]
    constants: Mapping[str, torch.Tensor]


NO_SAMPLES = CollatedSamples((), MappingProxyType({}))


@dataclass(frozen=True)
class CallExample:
    """The symbol values of one sample, and the values of a call's operands that its inputs determine."""

    sizes: Mapping[str, int]
    values: OperandValues


class CallExamples:
    """Turns collated samples into arguments of calls."""

    def __init__(self, graph: GraphOp, samples: CollatedSamples) -> None:
        self._graph, self._batches, self._constants = graph, samples.batches, samples.constants
        self._optional = set(strings_of(graph.optional))

    def examples_of_call(self, case: CaseOp, call: CallOp) -> Iterator[CallExample]:
        """Yield the integer arguments of a call for up to MAX_EXAMPLES samples with the case's input
        pattern."""
        when = set(strings_of(case.when))
        for batch in [b for b in self._batches if self._optional & b.keys() == when][:MAX_EXAMPLES]:
            sizes = {name: self._symbol_value(batch, name) for name in self._graph.symbols}
            yield CallExample(sizes, compute_operand_values(call, batch, sizes, self._constants))

    def _symbol_value(self, batch: Mapping[str, Any], name: str) -> int:
        symbol = self._graph.symbols[name]
        key = symbol.key.data
        return (batch[key].shape[symbol.dim.data] if key in batch else 0) if key else 1


def compute_operand_values(
    call: CallOp, batch: Mapping[str, Any], sizes: Mapping[str, int], constants: Mapping[str, torch.Tensor]
) -> OperandValues:
    """Compute the operands of a call that inputs alone determine, for one collated batch.

    batch: tensors by key. sizes: symbol values. constants: tensors by name, of any shape. Returns the values
    of non-floating operands, with the shapes that the operands' types have at `sizes`. Evaluates backwards
    from the call, so that no other operation runs.
    """
    computed: dict[SSAValue, torch.Tensor | None] = {}

    def value_of(ssa: SSAValue) -> torch.Tensor | None:
        if ssa not in computed:
            computed[ssa] = None
            if isinstance(ssa.owner, Operation):
                for result, tensor in zip(ssa.owner.results, run_op(ssa.owner), strict=False):
                    computed[result] = tensor
        return computed[ssa]

    def run_op(op: Operation) -> Sequence[torch.Tensor | None]:
        match op:
            case InputOp():
                return [batch[op.key.data]]
            case ConstOp():
                return [constants.get(op.key.data)]
            case GlueOp() if recorded_label(op) is None:
                operands = [value_of(o) for o in op.operands]
                return [] if any(o is None for o in operands) else run_glue(op, operands, sizes)
            case _:
                return []

    values = {o: value_of(o) for o in call.operands}
    return {o: v for o, v in values.items() if v is not None and not v.is_floating_point()}
