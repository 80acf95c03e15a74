"""Modules that have run are copied without the history of tensors that they keep."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from secc.runtime.model.module_copies import copy_module


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.map = self.score(x).softmax(-1)
        return self.map * x


def test_results_in_containers_of_modules_are_copied_once_and_without_history() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    result = model(torch.ones(2, 4))
    model.kept = {"steps": [result, (result * 2,)], "last": SimpleNamespace(value=result)}
    copied = copy_module(model).kept
    assert isinstance(copied, dict)
    assert copied["steps"][0] is copied["last"].value and copied["last"].value.is_leaf
    assert torch.equal(copied["steps"][1][0], result * 2)


def test_a_module_that_keeps_a_result_is_copied() -> None:
    model = nn.Sequential(Looking(), Looking())
    expected = model(torch.ones(2, 4))
    copied = copy_module(model)
    kept, own = copied[0].map, model[0].map
    assert isinstance(kept, torch.Tensor) and isinstance(own, torch.Tensor)
    assert torch.equal(kept, own) and kept.is_leaf and not own.is_leaf
    assert torch.equal(copied(torch.ones(2, 4)), expected)
    assert copied[0].score.weight is not model[0].score.weight
