"""Updated parameters arrive behind the next forward: each layer waits for its own, none is read before."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from secc.runtime.parameters.parameter_gathers import ParameterGathers, ShardedBucket
from secc.runtime.parameters.reduction_times import exposed_gather_ns
from secc.runtime.parameters.sharded_optimizer import FlatParameters

HEAD, FIRST, SECOND = "head", "layers.0", "layers.1"


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.head = nn.Linear(2, 2, bias=False)


class _Arrival:
    """A gather in which the other replica's values arrive when it is waited for."""

    def __init__(self, flat: FlatParameters) -> None:
        self.flat = flat

    def wait(self) -> None:
        self.flat.buffer[self.flat.shard_size :] = 7


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> tuple[_Tower, ParameterGathers, list[int]]:
    """A model, the gathers of its three parameters (one bucket each, sharded over two replicas), and a list
    that records the number of each bucket when its gather starts."""
    model, started = _Tower(), list[int]()
    named = dict(model.named_parameters())
    flats = {
        name: FlatParameters([(f"{name}.weight", named[f"{name}.weight"])], 0, 2)
        for name in (HEAD, SECOND, FIRST)
    }

    def start(flat: FlatParameters, group: object) -> _Arrival:
        started.append(next(k for k, f in enumerate(flats.values()) if f is flat))
        return _Arrival(flat)

    monkeypatch.setattr(FlatParameters, "gather_values", start)
    buckets = [ShardedBucket("lm", [named[f"{n}.weight"]], f, None) for n, f in flats.items()]
    return model, ParameterGathers(model, buckets, {"lm": list(model.layers)}, {}), started


def arrived(model: _Tower) -> set[str]:
    """The modules with all values of both replicas."""
    named = {HEAD: model.head, FIRST: model.layers[0], SECOND: model.layers[1]}
    return {n for n, m in named.items() if (m.weight[1] == 7).all() and m.weight.isfinite().all()}


def test_each_layer_waits_for_its_own_parameters(tower):
    model, gathers, started = tower
    gathers.start_all()
    assert started == [0, 2, 1]  # outside of layers first, then as layers run
    assert arrived(model) == set() and model.layers[0].weight.isnan().all()
    gathers.before_compute("lm", whole=False)
    assert arrived(model) == {HEAD}
    model.layers[0](torch.ones(2))
    assert arrived(model) == {HEAD, FIRST}
    model.layers[1].forward(torch.ones(2))
    assert arrived(model) == {HEAD, FIRST, SECOND}


def test_all_parameters_are_there_after_finish_and_before_a_pass_without_samples(tower):
    model, gathers, _ = tower
    gathers.start_all()
    gathers.before_compute("another", whole=True)
    assert arrived(model) == set()
    gathers.before_compute("lm", whole=True)
    assert arrived(model) == {HEAD, FIRST, SECOND}
    gathers.start_all()
    gathers.finish_all()
    assert arrived(model) == {HEAD, FIRST, SECOND}


def test_what_the_first_forward_does_not_hide():
    quarter = Fraction(1, 4)
    assert exposed_gather_ns(1000, quarter, 0) == 1000
    assert exposed_gather_ns(1000, quarter, 400) == 700  # three quarters of the forward hide it
    assert exposed_gather_ns(1000, quarter, 4000) == 250
    assert exposed_gather_ns(1000, Fraction(1, 1), 4000) == 1000
