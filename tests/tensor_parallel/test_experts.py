"""Experts side by side in parameters of three dims are cut by their inner width, whatever their code and the
order of their dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

from secc.frontend.tp_search.expert_cuts import find_expert_cuts
from secc.frontend.tp_search.find_mapping import expert_shards, expert_style
from secc.frontend.tp_search.verify_mapping import UnsplitModule
from secc.runtime.plan.schema import ModuleStyle
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.parameter_cuts import cut_of_shard
from tests.tensor_parallel.model_layers import first_layer

WIDTH, INNER, EXPERTS = 32, 64, 4
SMALL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
SOME: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
MIXTRAL = T.MixtralConfig(**SMALL, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2)
QWEN3 = T.Qwen3MoeConfig(**SMALL, **SOME, intermediate_size=48, moe_intermediate_size=INNER)
SQUARE = T.Qwen3MoeConfig(**SMALL, **SOME, intermediate_size=48, moe_intermediate_size=WIDTH)
GPT_OSS = T.GptOssConfig(
    **SMALL,
    intermediate_size=INNER,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    layer_types=["full_attention"],
)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("config", "halves"),
    [(MIXTRAL, (INNER, INNER)), (QWEN3, (INNER, INNER)), (SQUARE, (WIDTH, WIDTH)), (GPT_OSS, (2 * INNER,))],
)
def test_experts_of_models_are_cut(config: Any, halves: tuple[int, ...], count: int) -> None:
    """Gate and up side by side or entry by entry, `[experts, out, in]` and `[experts, in, out]`, square
    matrices, biases."""
    module, args, kwargs = first_layer(config)
    ((path, way),) = find_expert_cuts(module, (args, kwargs), count).items()
    cut = expert_shards(module.get_submodule(path), way, path)
    parts = {s.name.rpartition(".")[2]: s.parts for s in cut}
    assert parts["gate_up_proj"] == halves and sum(parts["down_proj"]) * 2 == sum(halves)
    verdict = UnsplitModule(module, (args, kwargs)).compare_mapping(
        count, [ModuleStyle(path, "experts")], cut
    )
    assert verdict.reason is None
    assert verdict.partial_parameters == ((f"{path}.down_proj_bias",) if config is GPT_OSS else ())


@pytest.mark.parametrize(("count", "ep"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("config", [MIXTRAL, QWEN3, GPT_OSS])
def test_ranks_hold_whole_experts(config: Any, count: int, ep: int) -> None:
    """Each rank has its experts' rows of every parameter, and what is routed to others costs it nothing. Two
    ranks that share experts cut them by their inner width, and each adds half of a bias of results."""
    module, args, kwargs = first_layer(config)
    cuts = find_expert_cuts(module, (args, kwargs), count, ep)
    ((path, way),) = cuts.items()
    shards = expert_shards(module.get_submodule(path), way, path)
    sizes = {n: p.numel() for n, p in module.get_submodule(path).named_parameters(prefix=path)}
    for index in range(count):
        own = [cut_of_shard(s, module.get_parameter(s.name).shape, index, count).local_shape for s in shards]
        assert sum(shape.numel() for shape in own) * count == sum(sizes.values())
        assert {shape[0] for shape in own} == {EXPERTS // ep}
    verdict = UnsplitModule(module, (args, kwargs)).compare_mapping(count, [expert_style(way, path)], shards)
    assert (verdict.reason, verdict.partial_parameters) == (None, ())


@pytest.mark.parametrize(("count", "ep", "replicas"), [(1, 1, 4), (2, 2, 2)])
@pytest.mark.parametrize("config", [QWEN3, GPT_OSS])
def test_replicas_hold_different_experts(config: Any, count: int, ep: int, replicas: int) -> None:
    """Experts are shown to compute tokens of other replicas: one or many of them, and all for one expert."""
    module, args, kwargs = first_layer(config)
    ((path, way),) = find_expert_cuts(module, (args, kwargs), count, ep, replicas).items()
    assert way.replicas == replicas and way.inner == {}
    shards = expert_shards(module.get_submodule(path), way, path)
    experts = shards[0]
    held = [
        cut_of_shard(experts, module.get_parameter(experts.name).shape, index, count, replica).ranges
        for index in range(count)
        for replica in range(replicas)
    ]
    share = EXPERTS // (count * replicas)
    assert held == [((start, start + share),) for start in range(0, EXPERTS, share)]


def test_experts_that_mix_tokens_are_not_divided_over_replicas() -> None:
    """A capacity counts the tokens of all samples together; replicas would count their own."""
    torch.manual_seed(0)
    assert find_expert_cuts(CapacityLayer(), CAPACITY_CALL, 1, 1, 2) == {}


class DroppedTokens(nn.Module):
    """Experts that each take their first two tokens only: which ones depends on other tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            rows, places = torch.where(chosen == expert)
            rows, places = rows[::2], places[::2]
            result = (x[rows] @ self.up[expert]).relu() @ self.down[expert]
            out = out.index_add(0, rows, result * weights[rows, places, None])
        return out


class CapacityLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), DroppedTokens()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


CAPACITY_CALL = ((torch.randn(9, WIDTH, requires_grad=True),), {})


def test_experts_that_drop_tokens_by_their_place_keep_to_one_part_each() -> None:
    """A capacity is per expert, so experts on different ranks drop what they drop together."""
    torch.manual_seed(0)
    assert set(find_expert_cuts(CapacityLayer(), CAPACITY_CALL, 2, 2)) == {"experts"}


class Experts(nn.Module):
    """Three products of all experts at once, in plain PyTorch; `mixed` has what sums over the inner width
    before the last one."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)
        self.mixed = mixed

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = torch.bmm(x.expand(EXPERTS, -1, -1), self.gate).relu() * torch.bmm(
            x.expand(EXPERTS, -1, -1), self.up
        )
        inner = inner.softmax(-1) if self.mixed else inner
        return torch.einsum("eti,eih,te->th", inner, self.down, weights)


class Layer(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(mixed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x, F.softmax(self.router(x), -1))


def test_plain_experts_are_cut_and_routers_get_whole_gradients() -> None:
    torch.manual_seed(0)
    module, call = Layer(mixed=False), ((torch.randn(6, WIDTH, requires_grad=True),), {})
    way = find_expert_cuts(module, call, 2)["experts"]
    assert way.inner == {"gate": (2, 1), "up": (2, 1), "down": (1, 1)}
    verdict = UnsplitModule(module, call).compare_mapping(
        2, [ModuleStyle("experts", "experts")], expert_shards(module.experts, way, "experts")
    )
    assert (verdict.reason, verdict.partial_parameters) == (None, ())


def test_experts_that_mix_their_inner_width_stay_whole() -> None:
    torch.manual_seed(0)
    assert find_expert_cuts(Layer(mixed=True), ((torch.randn(6, WIDTH),), {}), 2) == {}


@pytest.mark.parametrize("count", [3, 16])
def test_an_inner_width_that_ranks_cannot_share_in_whole_rows_of_kernels_stays_whole(count: int) -> None:
    torch.manual_seed(0)
    assert find_expert_cuts(Layer(mixed=False), ((torch.randn(6, WIDTH),), {}), count) == {}


class CountedExperts(nn.Module):
    """Experts; forward takes their number from a constant or from an attribute."""

    def __init__(self, is_constant: bool) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8) for _ in range(2))
        self.is_constant, self.num_experts = is_constant, EXPERTS

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS if self.is_constant else self.num_experts):
            rows, places = torch.where(chosen == expert)
            result = (x[rows] @ self.up[expert]).relu() @ self.down[expert]
            out = out.index_add(0, rows, result * weights[rows, places, None])
        return out


@pytest.mark.parametrize("is_constant", [False, True])
def test_code_that_counts_experts_by_a_constant_looks_for_those_of_other_ranks(is_constant: bool) -> None:
    torch.manual_seed(0)
    layer = CapacityLayer()
    layer.add_module("experts", CountedExperts(is_constant))
    assert set(find_expert_cuts(layer, CAPACITY_CALL, 2, 2)) == (set() if is_constant else {"experts"})
    reason = UnsplitReason(UnsplitKind.EXPERTS_INEXACT)
    assert "number from its parameters or from an attribute" in str(reason)
