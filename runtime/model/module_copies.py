"""Copies of modules that have run: torch copies no tensors with a history, which forward may leave on modules
(attention maps, lists of losses, weights that a hook computes)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)


class CopiesWithoutHistory(TorchFunctionMode):
    """While this mode is on, `copy.deepcopy` takes `copy_tensor(tensor)` as the copy of a tensor with a
    history, wherever it finds one."""

    def __init__(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._copy_tensor(tensor))
        return func(*args, **(kwargs or {}))


def copy_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of a module in which such tensors have no history. memo: as of `copy.deepcopy`."""
    with CopiesWithoutHistory(lambda tensor: tensor.detach().clone()):
        return copy.deepcopy(module, memo)
