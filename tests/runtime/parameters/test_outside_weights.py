"""Hooks of the optimizer and `on_step` that use weights which a rank lacks, or holds as a part or a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from secc.runtime.errors import UserError
from secc.runtime.parameters.outside_weights import PartialWeights

NET = nn.Linear(2, 2)
TENSORS = dict(NET.named_parameters())


def hooked(function: object) -> optim.Optimizer:
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: function())  # type: ignore[operator]
    return optimizer


def test_hooks_may_not_use_a_copy_and_callbacks_may() -> None:
    weights = PartialWeights(3, {}, {"weight": "updates a copy of it"}, TENSORS)
    optimizer = hooked(lambda: NET.weight.data.sum())
    weights.watch_hooks(optimizer)
    with pytest.raises(UserError, match="uses weight, which it takes from the model: rank 3 updates a copy"):
        optimizer.step()
    assert weights.watch_callback("on_step", lambda: NET.weight.sum().item())() == NET.weight.sum().item()


def test_what_a_rank_does_not_hold_is_refused_everywhere_but_its_shape() -> None:
    weights = PartialWeights(0, {"bias": "does not hold it"}, {}, TENSORS)
    with pytest.raises(UserError, match="on_step uses bias") as refused:
        weights.watch_callback("on_step", lambda: torch.cat([NET.weight[0], NET.bias]))()
    assert "test_outside_weights.py:" in refused.value.where
    assert weights.watch_callback("on_step", lambda: NET.bias.shape[0] + NET.bias.numel())() == 4
    optimizer = hooked(lambda: NET.weight.sum())
    weights.watch_hooks(optimizer)
    optimizer.step()


def test_hooks_may_use_the_part_that_the_optimizer_updates() -> None:
    optimizer = optim.SGD(NET.parameters(), lr=0.0)
    seen = list[float]()
    optimizer.register_step_post_hook(lambda *_: seen.append(NET.weight.norm().item()))
    PartialWeights(1, {"weight": "has a part of it"}, {}, TENSORS).watch_hooks(optimizer)
    optimizer.step()
    assert seen == [NET.weight.norm().item()]
