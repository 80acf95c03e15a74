"""Saved activations in host memory: the same gradients bit by bit, few layers on the device, each storage
copied once, and versions still checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from secc.runtime.parameters import host_copies
from secc.runtime.parameters.host_copies import CopyEngine, HostCopies, PendingCopy
from secc.runtime.training import offloaded_activations
from secc.runtime.training.offloaded_activations import ActivationOffload

WIDTH, LAYERS, ROWS = 64, 6, 32


class Layer(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.compute, x, mask, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return self.compute(x, mask)

    def compute(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)  # three saved views of one storage
        return x + self.out((q * k * mask).tanh() * v)


class Stack(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(recomputes) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).square().mean()


@pytest.fixture(autouse=True)
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_copies.COPY_RATE_VARIABLE, "1e8")


def offload(stack: Stack) -> ActivationOffload:
    return ActivationOffload({"stack": list(stack.layers)}, stack, HostCopies(torch.device("cpu")))


def make_inputs(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.rand(ROWS, WIDTH, generator=generator)


def gradients_in_order(stack: Stack, order: str, offloaded: ActivationOffload | None) -> list[torch.Tensor]:
    """Runs forwards and backwards of micro-batches, such as "F0 F1 B0 B1"."""
    losses: dict[str, torch.Tensor] = {}
    held = {}
    for kind, number in order.split():
        if kind == "B":
            if offloaded is not None:
                offloaded.begin_backward(held[number])
            losses.pop(number).backward()
            if offloaded is not None:
                held.pop(number).end_backward()
        elif offloaded is None:
            losses[number] = stack(*make_inputs(int(number)))
        else:
            with offloaded.record_forward("stack") as held[number]:
                losses[number] = stack(*make_inputs(int(number)))
    gradients = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
    stack.zero_grad()
    return gradients


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("order", ["F0 B0 F1 B1", "F0 F1 B0 F2 B1 B2", "F0 F1 B1 B0"])
def test_gradients_are_the_same_bit_by_bit(order: str, recomputes: bool) -> None:
    plain, moved = Stack(recomputes), Stack(recomputes)
    expected = gradients_in_order(plain, order, None)
    found = gradients_in_order(moved, order, offload(moved))
    assert len(found) == len(expected) == len(list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_layers_are_on_the_device_and_all_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = WeakSet[offloaded_activations._Storage]()
    init = offloaded_activations._Storage.__init__

    def note(self: offloaded_activations._Storage, *args: Any) -> None:
        init(self, *args)
        made.add(self)

    def storages_on_device() -> list[offloaded_activations._Storage]:
        return [s for s in made if s.values is not None]

    monkeypatch.setattr(offloaded_activations._Storage, "__init__", note)
    stack = Stack()
    offloaded, mask = offload(stack), make_inputs(0)[1]
    of_layer: list[int] = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda *_: of_layer.append(len(storages_on_device())))
    with offloaded.record_forward("stack") as saved:
        loss = stack(make_inputs(0)[0], mask)
    assert saved is not None
    one = of_layer[0]
    assert one > 3 and max(of_layer) <= one + 1, "the layer before leaves while one computes"
    offloaded.finish_leaving()
    assert storages_on_device() == []
    on_device: list[int] = []
    for layer in stack.layers:
        layer.out.weight.register_hook(lambda _: on_device.append(len(storages_on_device())))
    offloaded.begin_backward(saved)
    loss.backward()
    saved.end_backward()
    assert max(on_device) <= 2 * one + 1
    del loss, saved
    assert storages_on_device() == []


def test_each_storage_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    kept: list[torch.UntypedStorage] = []  # so that no address is given to another storage
    start: Callable[..., PendingCopy] = CopyEngine.start

    def count(self: CopyEngine, target: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        kept.append(source.untyped_storage())
        copied.append((kept[-1].data_ptr(), source.nbytes))
        return start(self, target, source)

    monkeypatch.setattr(CopyEngine, "start", count)
    stack = Stack()
    offloaded = offload(stack)
    x, mask = make_inputs(0)
    with offloaded.record_forward("stack"):
        loss = stack(x, mask)
    assert len(copied) == len(set(copied)), "views of a storage, and a mask that layers share, leave once"
    parameters = {p.untyped_storage().data_ptr() for p in stack.parameters()}
    assert not parameters & {address for address, _ in copied}
    assert (mask.untyped_storage().data_ptr(), mask.nbytes) in copied
    del loss


@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_writing_to_a_saved_tensor_is_an_error(layer: int) -> None:
    """As in plain PyTorch: where the tensor leaves, and in the last layer."""
    stack, (x, mask) = Stack(), make_inputs(0)
    offloaded = offload(stack)

    def write_to_input(module: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        args[0].add_(1)

    stack.layers[layer].qkv.register_forward_hook(write_to_input)
    for context in (nullcontext(), offloaded.record_forward("stack")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            with context as saved:
                loss = stack(x, mask)
            if saved is not None:
                offloaded.begin_backward(saved)
            loss.backward()


def test_a_tensor_that_stays_is_checked_too() -> None:
    stack = Stack()
    offloaded = offload(stack)
    with offloaded.record_forward("stack") as saved:
        x, mask = make_inputs(0)
        for layer in stack.layers:
            x = layer(x, mask)
        head = x * 1
        loss = stack.head(head).square().mean()
        head.add_(1)
    assert saved is not None
    offloaded.begin_backward(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
