"""Stands for `loss.item()` while forward is recorded, when the value is not known yet: forward may return it
for the log, also after arithmetic with numbers (`right.item() / len(y)`)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves


class DeferredScalar:
    """Stands for `tensor.item()`. It may be stored, returned and printed. Arithmetic with numbers and others
    of its kind gives another one, as Python would compute it; any other operation on its value calls
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

    def __round__(self, digits: int | None = None) -> DeferredScalar:
        """Return the number as it is: rounded for the log, it would not add up over samples."""
        if digits is None or not self.tensor.is_floating_point():
            self.refuse_read()
        return self

    def compute_result(self, operation: Callable[..., torch.Tensor], *operands: object) -> DeferredScalar:
        """Compute an operation on this and other real numbers."""
        if not all(isinstance(o, DeferredScalar | int | float) for o in operands):
            self.refuse_read()
        with torch.no_grad():
            values = [_widen(o.tensor) if isinstance(o, DeferredScalar) else o for o in operands]
            return DeferredScalar(operation(*values), self.refuse_read)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a scalar in the dtype that Python computes in."""
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _divide(dividend: Any, divisor: Any) -> torch.Tensor:
    """Divide numbers as Python does: two integers give a float of 64 bits, and not one of 32."""
    if isinstance(dividend, torch.Tensor):
        return dividend.double() / divisor
    return dividend / divisor.double()


def _refuse_operation(self: DeferredScalar, *_: object) -> NoReturn:
    self.refuse_read()


def _define_operators() -> None:
    """Define the arithmetic of deferred scalars, and refuse the operators that look at values."""
    for name, operation in {"neg": operator.neg, "pos": operator.pos, "abs": operator.abs}.items():
        setattr(DeferredScalar, f"__{name}__", lambda self, f=operation: self.compute_result(f, self))
    for name, operation in {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "truediv": _divide,
    }.items():
        setattr(
            DeferredScalar,
            f"__{name}__",
            lambda self, other, f=operation: self.compute_result(f, self, other),
        )
        setattr(
            DeferredScalar,
            f"__r{name}__",
            lambda self, other, f=operation: self.compute_result(f, other, self),
        )
    refused = "bool ceil complex divmod eq float floor floordiv ge gt hash index int le lt mod ne pow trunc"
    for name in (*refused.split(), "rdivmod", "rfloordiv", "rmod", "rpow"):
        setattr(DeferredScalar, f"__{name}__", _refuse_operation)


_define_operators()


def unwrap_deferred_scalar(value: object) -> object:
    """Return the tensor of a DeferredScalar; any other value as it is."""
    return value.tensor if isinstance(value, DeferredScalar) else value
