"""Values of the arguments of calls and glue, and runs of glue with torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from secc.ir.dialect import size_expr
from secc.ir.dialect.argument_template import CallArguments, DottedName, OperandRef
from secc.ir.dialect.ops import Computation, GlueOp


def fill_arguments(
    op: Computation, operands: Sequence[Any], sizes: Mapping[str, int], device: torch.device
) -> CallArguments:
    """Returns the arguments of an operation with its tensors `operands` in their places, at these symbol
    values. `device`: that of tensors which the operation makes."""

    def value_of(leaf: Any) -> Any:
        match leaf:
            case OperandRef(index=index):
                return operands[index]
            case DottedName(text="device"):
                return device
            case DottedName(text=text):
                return getattr(torch, text.removeprefix("torch."))
            case sympy.Expr():
                return size_expr.evaluate_size(leaf, sizes)
            case _:
                return leaf

    return op.arguments.map_leaves(value_of)


def run_glue(
    op: GlueOp, operands: Sequence[Any], sizes: Mapping[str, int], device: str = "cpu"
) -> Sequence[torch.Tensor]:
    """Runs an operation with torch. operands: its tensors; sizes: symbol values; device: that of tensors
    which the operation makes. Returns its results, and raises what torch raises."""
    arguments = fill_arguments(op, operands, sizes, torch.device(device))
    function: Any = torch.ops
    for part in op.target.data.split("."):
        function = getattr(function, part)
    result = function(*arguments.args, **arguments.kwargs)
    return result if isinstance(result, tuple | list) else [result]
