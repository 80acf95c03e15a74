"""Stands for `loss.item()` while forward is recorded, when the value is not known yet: forward may return it
for the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves


class DeferredScalar:
    """Stands for `tensor.item()`. It may be stored, returned and printed; an operation on its value calls
    `refuse_read`, which raises.

    It is no float, which torch would take for a constant.
    """

    def __init__(self, tensor: torch.Tensor, refuse: Callable[[], NoReturn]) -> None:
        self.tensor, self.refuse_read = tensor, refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse an operation on tensors that has the number as an argument."""
        leaves = tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls)).refuse_read()

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"


def _refuse_operation(self: DeferredScalar, *_: object) -> NoReturn:
    self.refuse_read()


# Operators that look at the value.
_REFUSED_OPERATORS = (
    "abs bool ceil complex divmod eq float floor floordiv ge gt hash index int le lt mod mul ne neg pos pow "
    "round sub add truediv trunc"
)
_REFUSED_REFLECTED_OPERATORS = "radd rdivmod rfloordiv rmod rmul rpow rsub rtruediv"
for _name in (*_REFUSED_OPERATORS.split(), *_REFUSED_REFLECTED_OPERATORS.split()):
    setattr(DeferredScalar, f"__{_name}__", _refuse_operation)


def unwrap_deferred_scalar(value: object) -> object:
    """Return the tensor of a DeferredScalar; any other value as it is."""
    return value.tensor if isinstance(value, DeferredScalar) else value
