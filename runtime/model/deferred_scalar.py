"""A number that Python asks a tensor for before anybody knows it: `loss.item()` in what forward returns for
the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves


class Unread:
    """Stands for `tensor.item()`. It may be kept, returned and printed; what looks at its value calls
    `refuse`, which raises.

    It is no float: torch would take one for a constant.
    """

    def __init__(self, tensor: torch.Tensor, refuse: Callable[[], NoReturn]) -> None:
        self.tensor, self.refuse = tensor, refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """A number in an operation on tensors."""
        leaves = tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls)).refuse()

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"


def _refuse(self: Unread, *_: object) -> NoReturn:
    self.refuse()


_LOOKS = "abs bool ceil complex divmod eq float floor floordiv ge gt hash index int le lt mod mul ne neg pos pow round sub add truediv trunc"
_TURNED = "radd rdivmod rfloordiv rmod rmul rpow rsub rtruediv"
for _name in (*_LOOKS.split(), *_TURNED.split()):
    setattr(Unread, f"__{_name}__", _refuse)


def opened(value: object) -> object:
    """The tensor behind a number that nobody knows; anything else as it is."""
    return value.tensor if isinstance(value, Unread) else value
