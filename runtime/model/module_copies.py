"""Copies of modules that have run: torch copies no tensors with a history, which forward may leave on modules
as attributes (attention maps, weights that a hook computes)."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def copy_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of a module in which such tensors have no history. memo: as of `copy.deepcopy`."""
    memo = {} if memo is None else memo
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf and id(value) not in memo:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)
