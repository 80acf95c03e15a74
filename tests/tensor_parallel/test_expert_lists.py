"""Experts that are modules in a list are divided among ranks if their rows do not depend on each other's
results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.frontend.tp_search.expert_cuts import find_expert_cuts, mixture_sizes
from secc.frontend.tp_search.find_mapping import expert_shards
from secc.frontend.tp_search.listed_rows import count_listed_choices
from secc.runtime.sections.recompute import find_layer_stacks
from secc.runtime.tensor_parallel.expert_lists import is_expert_list
from secc.runtime.tensor_parallel.parameter_cuts import cut_of_shard
from tests.models.listed_experts import EXPERTS, WIDTH, AllOfThem, ChosenOnly, Expert, Layer, Model

CALL = ((torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True),), {})


class ScoresToo(ChosenOnly):
    """Also returns the router's scores, one row for each token."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x), self.router(x.reshape(-1, WIDTH))


class Chained(AllOfThem):
    """Each expert gets what the one before it made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Noisy(AllOfThem):
    """Draws numbers for the router, other ones in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.rand_like(x))


class ByBatch(AllOfThem):
    """The experts' inputs depend on all tokens of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean((0, 1)))


@pytest.mark.parametrize(("count", "ep", "replicas"), [(2, 2, 1), (4, 4, 1), (1, 1, 4), (2, 2, 2)])
@pytest.mark.parametrize("mixture", [ChosenOnly, AllOfThem, ScoresToo])
def test_ranks_hold_whole_modules(mixture: type[nn.Module], count: int, ep: int, replicas: int) -> None:
    """Each rank has all parameters of its experts and none of others."""
    torch.manual_seed(0)
    module = mixture()
    way = find_expert_cuts(module, CALL, count, ep, replicas)[""]
    assert (way.listed, way.ep, way.replicas) == ("experts", ep, replicas)
    for shard in expert_shards(module, way):
        expert, shape = int(shard.name.split(".")[1]), module.get_parameter(shard.name).shape
        places = [(i, r) for i in range(count) for r in range(replicas)]
        held = [cut_of_shard(shard, shape, i, count, r).local_shape for i, r in places]
        assert [n for n, own in enumerate(held) if own.numel()] == [expert * count * replicas // EXPERTS]
        assert shape in held


@pytest.mark.parametrize("mixture", [Chained, Noisy])
def test_lists_stay_on_all_ranks_if_two_passes_differ(mixture: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert find_expert_cuts(mixture(), CALL, 2, 2) == {}


def test_rows_that_depend_on_other_samples_stay_in_their_replica() -> None:
    torch.manual_seed(0)
    assert find_expert_cuts(ByBatch(), CALL, 1, 1, 2) == {}
    assert set(find_expert_cuts(ByBatch(), CALL, 2, 2)) == {""}


def test_experts_are_no_layers() -> None:
    """Layers stay what is recomputed and gathered, also where a block is one layer."""
    model = Model()
    assert list(find_layer_stacks(model)) == [model.layers]
    assert list(find_layer_stacks(model.layers[0])) == []


def test_only_equal_modules_are_experts() -> None:
    mixture = ChosenOnly()
    assert mixture_sizes(mixture)["experts.up.weight"] == (EXPERTS, 24, WIDTH)
    assert mixture_sizes(Layer(mixture)) == {}
    mixture.experts[1].up = nn.Linear(WIDTH, 32)
    assert mixture_sizes(mixture) == {}
    mixture.experts = nn.ModuleList([Expert()] * 2)
    assert mixture_sizes(mixture) == {}


def test_rows_of_experts_in_lists_are_counted() -> None:
    torch.manual_seed(0)
    ids = torch.arange(1, 7)[None]
    found = count_listed_choices(Model(), [{"input_ids": ids, "labels": ids}] * 3)
    assert found == {"layers.0.mixture": 2, "layers.1.mixture": EXPERTS, "layers.2.mixture": 2}


def test_a_list_with_an_entry_that_is_none_holds_no_experts() -> None:
    assert not is_expert_list("experts", nn.ModuleList([nn.Linear(2, 2), None]))  # type: ignore[list-item]
