"""Arguments of a block's call at given sizes: random numbers, and the integer values that inputs
determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from secc.cost.counting.example_arguments import OperandValues
from secc.ir.analysis.run_glue import fill_arguments
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.runtime.model.nested_batch import listed


def random_arguments(
    call: CallOp, sizes: Mapping[str, int], known: OperandValues, device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Create new arguments, so that a call may modify them in place.

    sizes: symbol values. known: values of integer operands; other integers are 0, and other masks true.
    """
    operands = [
        known[o].to(device) if o in known else _random_operand(tensor_type(o), sizes, device)
        for o in call.operands
    ]
    arguments = fill_arguments(call, operands, sizes, device)
    return listed(arguments.args), listed(arguments.kwargs)


def _random_operand(type_: TensorType, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
    dims = [int(size_expr.evaluate_size(d, sizes)) for d in type_.shape]
    dtype = getattr(torch, type_.torch_dtype)
    if dtype == torch.bool:
        return torch.ones(dims, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return torch.zeros(dims, dtype=dtype, device=device)
    return torch.randn(dims, device=device).to(dtype).requires_grad_(type_.requires_grad)
