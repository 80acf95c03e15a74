"""Weights in host memory: at most two layers are on the device; the next one arrives while one computes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from secc.runtime.parameters import host_copies
from secc.runtime.parameters.host_copies import HostCopies
from secc.runtime.parameters.offloaded_weights import HostUnit
from secc.runtime.parameters.zero3 import UnitGatherer

WIDTH, LAYERS = 64, 6


def make_stack() -> tuple[nn.Sequential, UnitGatherer, list[HostUnit]]:
    torch.manual_seed(0)
    stack = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).requires_grad_(False)
    copies = HostCopies(torch.device("cpu"))
    units = [HostUnit(list(layer.named_parameters()), copies, {}, None) for layer in stack]
    gatherer = UnitGatherer("teacher", [[], *([unit] for unit in units)])
    return stack, gatherer, units


def layers_on_device(units: list[HostUnit]) -> int:
    return sum(p.untyped_storage().nbytes() > 8 for unit in units for p in unit.params[:1])


def test_passes_compute_the_same_with_two_layers_on_the_device() -> None:
    stack, gatherer, units = make_stack()
    x = torch.randn(4, WIDTH, requires_grad=True)
    copy = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).requires_grad_(False)
    for layer, unit in zip(copy, units, strict=True):
        for param, (leaf, _) in zip(layer.parameters(), unit.slices.values(), strict=True):
            param.data = leaf.data
    most: list[int] = []
    for k, layer in enumerate(stack, 1):
        gatherer.wrap_unit(k, layer)
        layer.register_forward_hook(lambda *_: most.append(layers_on_device(units)))
    assert layers_on_device(units) == 0 and all(p.isnan().all() for p in stack.parameters())
    gatherer.begin_pass(backward=False)
    out = stack(x)
    gatherer.end_pass()
    assert torch.equal(out, copy(x)) and layers_on_device(units) == 0
    assert most == [1] * LAYERS  # the next layer's buffer is there, but no parameter points to it yet
    gatherer.begin_pass(backward=True)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    gatherer.end_pass()
    assert torch.equal(gradient, torch.autograd.grad(copy(x).sum(), x)[0])
    assert layers_on_device(units) == 0


def test_the_next_layer_arrives_while_one_computes() -> None:
    stack, gatherer, units = make_stack()
    arriving: list[list[int]] = []
    for k, layer in enumerate(stack, 1):
        gatherer.wrap_unit(k, layer)
        layer.register_forward_hook(
            lambda *_: arriving.append([i for i, unit in enumerate(units) if unit.is_arriving])
        )
    gatherer.begin_pass(backward=False)
    stack(torch.randn(4, WIDTH))
    gatherer.end_pass()
    assert arriving == [[1], [2], [3], [4], [5], []]


def test_a_limited_engine_copies_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_copies.COPY_RATE_VARIABLE, "4e4")
    engine = HostCopies(torch.device("cpu")).to_device
    target, start = torch.zeros(1000), time.perf_counter()
    first, second = engine.start(target, torch.ones(1000)), engine.start(torch.zeros(1000), target)
    started_s = time.perf_counter() - start
    second.wait()
    assert target.sum() == 1000 and time.perf_counter() - start >= 0.2 > started_s
    first.wait()
