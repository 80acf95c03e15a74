"""Sums over ranks behind products: in which order a backward runs, how products are chunked, and exact
results with every gradient on layers of several models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn
from torch.utils.checkpoint import checkpoint

from secc.frontend.tp_search.find_mapping import find_mapping, mapping_shards
from secc.frontend.tp_search.verify_mapping import UnsplitModule
from secc.runtime.plan.schema import OVERLAPS, ModuleStyle, Shard
from secc.runtime.tensor_parallel.overlapped_products import PRODUCT_CHUNKS
from secc.runtime.tensor_parallel.replica_group import LoneRank, Wait
from secc.runtime.tensor_parallel.styles import apply_styles
from secc.runtime.training.split_backward import split_backward
from tests.tensor_parallel.model_layers import first_layer

WIDTH = 8
COLUMNS = ("queries", "keys", "values")


class _LoggingGroup(LoneRank):
    """One of two ranks; the other one has nothing to add. Logs when sums start and when they are awaited."""

    size = 2

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log.append("sum")
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Wait:
        self.log.append("start")
        return lambda: self.log.append("await")

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        self.log.append("gather")
        return torch.cat([tensor.new_zeros(n) if k else tensor for k, n in enumerate(lengths)])

    def start_reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Wait]:
        self.log.append("start")
        return tensor[: lengths[0]], lambda: self.log.append("await")


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.queries(x) @ self.keys(x).transpose(-1, -2)).softmax(-1)
        return self.out(scores @ self.values(x).relu_())


def _install(module: nn.Module, overlap: str, log: list[str]) -> nn.Module:
    """Splits the attention, with parts that have all entries, and logs its weights' gradients."""
    styles = [*(ModuleStyle(n, "colwise") for n in COLUMNS), ModuleStyle("out", "rowwise")]
    shards = [Shard(f"{s.module}.weight", int(s.kind == "rowwise"), (WIDTH,)) for s in styles]
    apply_styles(module, styles, _LoggingGroup(log), shards, overlap=overlap)
    for name in COLUMNS:
        weight = module.get_submodule(name).weight
        weight.register_post_accumulate_grad_hook(lambda _: log.append("weight"))
    return module


def _gradients(module: nn.Module, x: torch.Tensor, recompute: bool) -> list[torch.Tensor | None]:
    run = partial(checkpoint, module, use_reentrant=False) if recompute else module
    x = x.detach().requires_grad_()
    run(x * 2).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_sum_of_a_gradient_travels_while_weight_gradients_are_computed(recompute: bool) -> None:
    x, logs, found = torch.randn(3, 5, WIDTH), dict[str, list[str]](), dict[str, list[torch.Tensor | None]]()
    for overlap in OVERLAPS:
        torch.manual_seed(0)
        logs[overlap] = []
        found[overlap] = _gradients(_install(_Attention(), overlap, logs[overlap]), x, recompute)
    chunks = ["start"] * PRODUCT_CHUNKS + ["await"] * PRODUCT_CHUNKS
    hidden = ["start", *["weight"] * 3, "await"]  # a layer that runs again stops before its last sum
    assert logs == {
        "none": ["sum", *["weight"] * 3, "sum"],
        "backward": ["sum", *hidden],
        "both": chunks + hidden,
    }
    for overlap in OVERLAPS[1:]:
        for a, b in zip(found[overlap], found["none"], strict=True):
            assert a is not None and b is not None
            torch.testing.assert_close(a, b)


def test_a_split_backward_sums_in_its_first_part() -> None:
    log: list[str] = []
    module, leaf = _install(_Attention(), "both", log), torch.randn(2, 4, WIDTH, requires_grad=True)
    expected = _gradients(module, leaf, False)
    for p in module.parameters():
        p.grad = None
    leaf.grad = None
    out = module(leaf * 2).square().sum()
    log.clear()
    finish = split_backward([(out, torch.ones(()))], [leaf])
    assert log == ["start", "await"]
    finish()
    assert log == ["start", "await", "weight", "weight", "weight"]
    for found, wanted in zip([leaf.grad, *(p.grad for p in module.parameters())], expected, strict=True):
        assert found is not None and wanted is not None
        torch.testing.assert_close(found, wanted)


def test_frozen_weights_and_calls_without_gradients_sum_in_the_open() -> None:
    log: list[str] = []
    module = _install(_Attention(), "backward", log).requires_grad_(False)
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    module(x * 2).sum().backward()
    assert log == ["sum", "start", "await"]
    log.clear()
    with torch.no_grad():
        module(x)
    assert log == ["sum"]


def test_fewer_rows_than_chunks() -> None:
    log: list[str] = []
    _install(_Attention(), "both", log)(torch.randn(1, 2, WIDTH)).sum().backward()
    assert log == ["start"] * 2 + ["await"] * 2 + ["weight"] * 3


SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS = {
    "llama": T.LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=2),
    "qwen2": T.Qwen2Config(**SMALL, intermediate_size=24, num_key_value_heads=2),  # biases of q, k, v
    "gpt2": T.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=4),  # Conv1D
    "gpt_neox": T.GPTNeoXConfig(**SMALL, intermediate_size=24),  # attention and feed-forward side by side
    "bloom": T.BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=4),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("overlap", OVERLAPS[1:])
def test_layers_are_exact(name: str, overlap: str) -> None:
    layer, args, kwargs = first_layer(CONFIGS[name])
    mapping = find_mapping(layer, (args, kwargs), 2)
    assert mapping.column_parallel and mapping.row_parallel
    whole, cut = UnsplitModule(layer, (args, kwargs)), mapping_shards(layer, mapping)
    assert whole.compare_mapping(2, mapping.layer_styles(True), cut, overlap=overlap).reason is None
    if name not in ("gpt2", "bloom"):  # their code does not run on positions alone
        assert whole.compare_mapping(2, mapping.sequence_styles(True), cut, overlap=overlap).reason is None


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("length", [1, 3, 9, 17])
def test_positions_of_ranks_are_chunked_unevenly(count: int, length: int) -> None:
    """Ranks have fewer positions than chunks, or none."""
    layer, args, kwargs = first_layer(T.LlamaConfig(**SMALL, intermediate_size=24), length)
    mapping = find_mapping(layer, (args, kwargs), count)
    whole = UnsplitModule(layer, (args, kwargs))
    styles, cut = mapping.sequence_styles(False), mapping_shards(layer, mapping)
    assert whole.compare_mapping(count, styles, cut, overlap="both").reason is None


def test_a_sum_of_positions_travels_while_weight_gradients_are_computed() -> None:
    log: list[str] = []
    module = nn.Sequential(OrderedDict(norm=nn.LayerNorm(WIDTH), attention=_Attention()))
    columns = [ModuleStyle(f"attention.{n}", "columns") for n in COLUMNS]
    around = [ModuleStyle("", "sequence"), ModuleStyle("attention", "join")]
    inside = [*columns, ModuleStyle("attention.out", "scatter")]
    styles = [*around, *inside]
    shards = [Shard(f"{s.module}.weight", int(s.kind == "scatter"), (WIDTH,)) for s in inside]
    apply_styles(module, styles, _LoggingGroup(log), shards, overlap="both")
    attention = module.get_submodule("attention")
    for name in COLUMNS:
        weight = attention.get_submodule(name).weight
        weight.register_post_accumulate_grad_hook(lambda _: log.append("weight"))
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    module(x).sum().backward()
    forward = ["gather", *["start"] * 4, *["await"] * 4, "gather"]
    assert log == [*forward, "gather", "start", *["weight"] * 3, "await", "gather"]
