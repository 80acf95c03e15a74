"""Modules that have run are copied without the history of tensors that they keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from secc.runtime.model.module_copies import copy_module


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.map = self.score(x).softmax(-1)
        return self.map * x


def test_results_in_containers_of_modules_are_copied_once_and_without_history() -> None:
    model = Looking()
    result = model(torch.ones(2, 4))
    model.kept = [{"steps": (result, result * 2)}, SimpleNamespace(value=result)]
    steps, last = copy_module(model).kept
    assert steps["steps"][0] is last.value and last.value.is_leaf
    assert torch.equal(steps["steps"][1], result * 2)


def test_a_module_that_keeps_a_result_is_copied() -> None:
    model = nn.Sequential(Looking(), Looking())
    expected = model(torch.ones(2, 4))
    copied = copy_module(model)
    first, own_first = copied[0], model[0]
    assert isinstance(first, Looking) and isinstance(own_first, Looking)
    kept, own = first.map, own_first.map
    assert torch.equal(kept, own) and kept.is_leaf and not own.is_leaf
    assert torch.equal(copied(torch.ones(2, 4)), expected)
    assert first.score.weight is not own_first.score.weight
