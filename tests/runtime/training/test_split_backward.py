"""A backward in two parts computes the gradients of one backward, however parameters are used."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.runtime.training.split_backward import split_backward


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0] * torch.tanh(self.gate)
        return x + self.down(F.silu(self.up(x)))


class Twice(nn.Module):
    """Two layers, the first applied twice, a weight used by products and glue, a table without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.table = Layer(), Layer(), nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table(torch.arange(3))
        x = self.first(self.second(self.first(x + bias)))
        return (x @ self.second.up.weight.t()).square() + self.second.up.weight.sum() * self.first.gate


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer().requires_grad_(False), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def gradients(
    module: nn.Module, received: list[torch.Tensor], split: bool
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    leaves = [t.clone().requires_grad_() for t in received]
    outs = [module(leaves[0] + sum(leaves[1:]))]
    outs += [module(received[0]).mean()]  # a root that no received tensor reaches
    roots = [(t, torch.full_like(t, 0.3 + i)) for i, t in enumerate(outs)]
    module.zero_grad()
    if split:
        finish = split_backward(roots, leaves)
        first = [p.grad for p in module.parameters()]
        assert all(g is None for g in first)
        finish()
    else:
        torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
    return [t.grad for t in leaves], [None if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("kind", [Layer, Twice, Frozen])
@pytest.mark.parametrize("count", [1, 2])
def test_two_parts_give_the_gradients_of_one_backward(kind: type[nn.Module], count: int) -> None:
    torch.manual_seed(0)
    module, received = kind().double(), [torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(count)]
    whole, parts = gradients(module, received, split=False), gradients(module, received, split=True)
    for expected, found in zip(whole[0] + whole[1], parts[0] + parts[1], strict=True):
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_products_compute_one_gradient_per_part() -> None:
    torch.manual_seed(0)
    layers, leaf = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    out = layers(leaf)
    counts: list[int] = []
    finish = None
    for part in range(2):
        with torch.profiler.profile() as profile:
            if part == 0:
                finish = split_backward([(out, torch.ones_like(out))], [leaf])
            elif finish is not None:
                finish()
        counts.append(sum(e.count for e in profile.key_averages() if e.key == "aten::mm"))
    assert counts == [2, 2]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient, 2 * gradient


def test_the_second_part_runs_after_the_roots_are_dropped() -> None:
    """The nodes of a user's Function have to outlive the tensors above them, which a sent result does not."""
    first, second, leaf = (torch.ones(3, requires_grad=True) for _ in range(3))
    out = Doubled.apply(Doubled.apply(leaf, first), second)
    assert isinstance(out, torch.Tensor)
    finish = split_backward([(out, torch.ones(3))], [leaf])
    del out
    gc.collect()
    finish()
    assert leaf.grad is not None and leaf.grad.tolist() == [4.0] * 3
    assert first.grad is not None and first.grad.tolist() == [4.0] * 3
    assert second.grad is not None and second.grad.tolist() == [2.0] * 3


def test_without_received_tensors_all_is_done_in_the_second_part() -> None:
    layer = nn.Linear(4, 4)
    out = layer(torch.ones(2, 4))
    finish = split_backward([(out, torch.ones_like(out))], [])
    assert layer.weight.grad is None
    finish()
    assert layer.weight.grad is not None


def test_the_second_part_accumulates_the_last_layers_first() -> None:
    """While the gradients of the last layers are accumulated, those of the first are not computed yet."""
    torch.manual_seed(0)
    layers, leaf = [nn.Linear(8, 8) for _ in range(6)], torch.randn(4, 8, requires_grad=True)
    out, order = nn.Sequential(*layers)(leaf), list[int]()
    for place, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda p, place=place: order.append(place))
        layer.weight.register_hook(lambda g, place=place: order.append(place + 10))
    split_backward([(out, torch.ones_like(out))], [leaf])()
    assert sorted(order) == [*range(6), *range(10, 16)]
    assert {5, 4, 3, 2} == set(order[:8]) & set(range(6))
    assert set(order[8:]) == {1, 0, 11, 10}


def test_a_parameter_is_accumulated_once() -> None:
    """Buckets of gradients are summed when their parameters are accumulated, so there is no second time."""
    torch.manual_seed(0)
    module, counts = Twice().double(), list[nn.Parameter]()
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(counts.append)  # pyright: ignore[reportArgumentType]
    leaf = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    outs = [module(leaf), module(leaf.detach()).mean()]
    split_backward([(t, torch.ones_like(t)) for t in outs], [leaf])()
    assert len(counts) == len({id(p) for p in counts}) > 10
