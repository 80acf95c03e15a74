"""Hooks of the optimizer and `on_step` that use weights which a rank lacks, or holds as a part or a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn, optim

from secc.runtime.errors import UserError
from secc.runtime.parameters.equal_writes import UnequalWrite, find_unequal_write
from secc.runtime.parameters.outside_weights import HOOK_REMEDY, PartialWeights

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
    assert (
        weights.watch_callback("on_step", lambda: NET.weight.sum().item(), set())() == NET.weight.sum().item()
    )


def test_what_a_rank_does_not_hold_is_refused_everywhere_but_its_shape() -> None:
    weights = PartialWeights(0, {"bias": "does not hold it"}, {}, TENSORS)
    with pytest.raises(UserError, match="on_step uses bias") as refused:
        weights.watch_callback("on_step", lambda: torch.cat([NET.weight[0], NET.bias]), set())()
    assert "test_outside_weights.py:" in refused.value.where
    assert "register_step_post_hook" in refused.value.remedy
    assert weights.watch_callback("on_step", lambda: NET.bias.shape[0] + NET.bias.numel(), set())() == 4
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
    assert (
        weights.watch_callback("on_step", lambda: net.weight.sum().item(), set())() == net.weight.sum().item()
    )

    def assign() -> None:
        net.weight.data = torch.zeros(2, 2)

    def write_part() -> None:
        with torch.no_grad():
            net.weight[1].mul_(2)

    for write in (assign, write_part, lambda: net.weight.data.clamp_(0, 1)):
        before = net.weight.detach().clone()
        with pytest.raises(UserError, match=r"on_step writes to weight.*: rank 2 updates a flo") as refused:
            weights.watch_callback("on_step", write, set())()
        assert refused.value.remedy == HOOK_REMEDY
        assert torch.equal(net.weight, before)
    written = set[str]()
    weights.watch_callback("on_step", lambda: net.bias.data.fill_(3.0), written)()
    assert net.bias.tolist() == [3.0, 3.0] and written == {"bias"}


def test_callbacks_that_assign_data_write_where_a_sharded_optimizer_keeps_it() -> None:
    net = nn.Linear(2, 2)
    flat = torch.zeros(6)
    net.weight.data = flat[:4].view(2, 2)

    def assign() -> None:
        net.weight.data = torch.ones(2, 2)

    written = set[str]()
    PartialWeights(0, {}, {}, dict(net.named_parameters()), {}).watch_callback("on_step", assign, written)()
    assert flat.tolist() == [1, 1, 1, 1, 0, 0] and written == {"weight"}


def test_what_takes_the_place_of_a_weight_is_written_to_it_or_refused() -> None:
    net = nn.BatchNorm1d(2)
    net.bias.requires_grad_(False)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    tables = {"weight": "_parameters", "bias": "_parameters", "running_mean": "_buffers"}
    slots = [(name, vars(net)[table], name) for name, table in tables.items()]
    weights, written = PartialWeights(0, {}, {}, tensors, {}, slots), set[str]()

    def assign() -> None:
        net.bias = nn.Parameter(torch.full((2,), 5.0))
        net.running_mean = torch.full((2,), 6.0)

    weights.watch_callback("on_step", assign, written)()
    assert net.bias is tensors["bias"] and net.bias.tolist() == [5.0, 5.0]
    mean = net.running_mean
    assert mean is not None and mean is tensors["running_mean"] and mean.tolist() == [6.0, 6.0]
    assert written == {"bias", "running_mean"}
    for name, value in (("weight", nn.Parameter(torch.ones(2))), ("running_mean", torch.ones(3))):
        with pytest.raises(UserError, match=f"puts something else in the place of {name}"):
            weights.watch_callback("on_step", lambda n=name, v=value: setattr(net, n, v), set())()
        assert getattr(net, name) is tensors[name]


@pytest.mark.parametrize("failed", [False, True])
def test_unequal_writes_are_found_by_all_ranks(failed: bool) -> None:
    mine, other = {"a": torch.ones(2), "b": torch.ones(())}, {"a": torch.ones(2), "c": torch.ones(1)}
    names = ["a", "b", "c"]

    def exchange_with(answers: list[list[float]]) -> Callable[[Sequence[float]], torch.Tensor]:
        left = iter(answers)
        return lambda own: torch.tensor([list(own), next(left)], dtype=torch.float64)

    def exchanged_digests(tensors: dict[str, torch.Tensor], found: list[str]) -> list[float]:
        seen = list[list[float]]()

        def note_numbers(own: Sequence[float]) -> torch.Tensor:
            seen.append(list(own))
            return torch.tensor([list(own)], dtype=torch.float64)

        find_unequal_write(names, tensors, found, False, note_numbers)
        return seen[-1]

    equal = exchange_with([[0, failed], [0, 0, 0], exchanged_digests(other, ["a"])])
    assert find_unequal_write(names, mine, {"a"}, False, equal) is None
    other["a"][1] = 2
    unequal = exchange_with([[0, failed], [0, 0, 0], exchanged_digests(other, ["a"])])
    found = find_unequal_write(names, mine, {"a"}, False, unequal)
    assert found == (None if failed else UnequalWrite("a", (0,), (0, 1)))


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.detach().numpy(),
        lambda weight: np.asarray(weight.data[0]),
        lambda weight: np.from_dlpack(weight.detach()),
    ],
)
def test_writes_to_the_memory_of_a_weight_are_seen(view: Callable[[torch.Tensor], np.ndarray]) -> None:
    net, kept = nn.Linear(2, 2), list[np.ndarray]()

    def scale() -> None:
        kept.append(view(net.weight))
        kept[0][:] *= 0.5

    lost = {"weight": "updates a float32 copy of it"}
    weights = PartialWeights(1, {}, {}, dict(net.named_parameters()), lost)
    with pytest.raises(
        UserError, match=r"on_step writes to weight: rank 1 updates a float32 copy"
    ) as refused:
        weights.watch_callback("on_step", scale, set())()
    assert "test_outside_weights.py:" in refused.value.where
    assert "register_step_post_hook" in refused.value.remedy
    weights, written = PartialWeights(1, {}, {}, dict(net.named_parameters())), set[str]()
    weights.watch_callback("on_step", lambda: view(net.weight).sum(), written)()
    assert not written
    weights.watch_callback("on_step", lambda: kept[0].fill(2.0), written)()  # memory that it got earlier
    assert written == {"weight"}
