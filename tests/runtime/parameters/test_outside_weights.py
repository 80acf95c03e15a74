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


def test_callbacks_may_not_write_to_weights_whose_writes_are_lost() -> None:
    net = nn.Linear(2, 2)
    lost = {"weight": "updates a float32 copy of it"}
    weights = PartialWeights(2, {}, {}, dict(net.named_parameters()), lost)
    assert weights.watch_callback("on_step", lambda: net.weight.sum().item())() == net.weight.sum().item()

    def assign() -> None:
        net.weight.data = torch.zeros(2, 2)

    def write_part() -> None:
        with torch.no_grad():
            net.weight[1].mul_(2)

    for write in (assign, write_part, lambda: net.weight.data.clamp_(0, 1)):
        before = net.weight.detach().clone()
        with pytest.raises(UserError, match=r"on_step writes to weight.*: rank 2 updates a float32 copy"):
            weights.watch_callback("on_step", write)()
        assert torch.equal(net.weight, before)
    weights.watch_callback("on_step", lambda: net.bias.data.fill_(3.0))()
    assert net.bias.tolist() == [3.0, 3.0]


def test_callbacks_that_assign_data_write_where_a_sharded_optimizer_keeps_it() -> None:
    net = nn.Linear(2, 2)
    flat = torch.zeros(6)
    net.weight.data = flat[:4].view(2, 2)

    def assign() -> None:
        net.weight.data = torch.ones(2, 2)

    PartialWeights(0, {}, {}, dict(net.named_parameters()), {}).watch_callback("on_step", assign)()
    assert flat.tolist() == [1, 1, 1, 1, 0, 0]
