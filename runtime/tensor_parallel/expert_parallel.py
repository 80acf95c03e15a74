"""Expert parallelism inside a replica: each rank computes the tokens that are routed to its own experts, and
the results of all ranks are summed.

A module of experts takes hidden states `[..., width]`, the indices of the experts that each token is routed
to `[..., k]`, and their weights `[..., k]`. All ranks of a replica call it with the same tokens. A rank picks
the (token, choice) pairs of its own experts and calls the user's code with one choice per token, which is
what a router with `k = 1` would give it. Weights are applied where results are summed, so the gradient of a
weight is found from a result that this rank has.

Sums run in a fixed order: each pair has a place of its own, and the k places of a token are added together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.plan.schema import Shard
from secc.runtime.tensor_parallel.autograd_collectives import ShardedRegion


def route_to_own_experts(
    module: nn.Module, region: ShardedRegion, shards: Iterable[Shard]
) -> Callable[..., Any]:
    """Returns the forward of a module of experts of which this rank holds some.

    shards: how the module's parameters are cut. Sets the module's number of experts to that of this rank.
    Raises ValueError in forward for arguments of another form.
    """
    group, inner = region.group, module.forward
    experts, ep = count_experts(module, shards)
    start, stop = slice_bounds(experts, group.index * ep // group.size, ep)
    for name in expert_count_attributes(module, experts):
        setattr(module, name, stop - start)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        leaves, form = tree_flatten((args, kwargs))
        places = find_routing(leaves)
        hidden, index, weights = (leaves[place] for place in places)
        tokens, choices = region(hidden).flatten(0, -2), region(weights).flatten()
        chosen = index.flatten()
        pairs = ((chosen >= start) & (chosen < stop)).nonzero().flatten()
        picked = pairs
        if not len(
            pairs
        ):  # the code runs on one token, with a result that does not count: gradients are zero
            picked = pairs.new_zeros(1)
        local = (chosen[picked] - start).clamp(0, stop - start - 1)
        for place, value in zip(
            places,
            (
                take_pairs(tokens, picked, index.shape[-1]),
                local.unsqueeze(-1).to(index.dtype),
                weights.new_ones(len(picked), 1),
            ),
            strict=True,
        ):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, form)
        result = inner(*args, **kwargs) * choices[picked].unsqueeze(-1)
        if not len(pairs):
            result = result * 0
        total = sum_pairs(result, picked, index.shape[-1], len(tokens))
        return region.reduce_output(total.to(hidden.dtype)).view(*hidden.shape[:-1], -1)

    return forward


def count_experts(module: nn.Module, shards: Iterable[Shard]) -> tuple[int, int]:
    """Returns the number of experts on all ranks, and the number of parts (ep) that they form, of a module
    with cut parameters."""
    shard = next(iter(shards))
    own = module.get_parameter(shard.name.rpartition(".")[2]).shape[0]
    experts = own * shard.ep if shard.dim else sum(shard.parts)
    return experts, experts // own


def expert_count_attributes(module: nn.Module, experts: int) -> list[str]:
    """Returns the attributes of a module that hold its number of experts, by name and value."""
    return [
        name
        for name, value in vars(module).items()
        if type(value) is int and value == experts and "expert" in name
    ]


def find_routing(leaves: list[Any]) -> tuple[int, int, int]:
    """Returns the places of hidden states, indices and weights among the arguments of a module of experts.

    Raises ValueError if there are none: one tensor of integers, a float one of its shape, and a float one
    with one row for each of its rows.
    """
    tensors = [(i, t) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)]
    for at, index in tensors:
        if index.is_floating_point() or index.dtype == torch.bool or index.dim() < 2:
            continue
        floats = [(i, t) for i, t in tensors if t.is_floating_point() and t.dim() == index.dim()]
        weights = [i for i, t in floats if t.shape == index.shape and i > at]
        hidden = [i for i, t in floats if t.shape[:-1] == index.shape[:-1] and i not in weights[:1]]
        if len(hidden) == 1 and weights and len(tensors) == 3:
            return hidden[0], at, weights[0]
    raise ValueError("expected hidden states, indices of experts and weights as arguments")


class _TakePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, pairs: torch.Tensor, choices: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(pairs)
        ctx.choices, ctx.count = choices, len(tokens)
        return tokens[pairs // choices]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum_pairs(gradient, ctx.saved_tensors[0], ctx.choices, ctx.count), None, None


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: torch.Tensor, pairs: torch.Tensor, choices: int, count: int
    ) -> torch.Tensor:
        ctx.save_for_backward(pairs)
        ctx.choices = choices
        spread = values.new_zeros(count * choices, values.shape[-1])
        spread[pairs] = values
        return spread.view(count, choices, values.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return take_pairs(gradient, ctx.saved_tensors[0], ctx.choices), None, None, None


def take_pairs(tokens: torch.Tensor, pairs: torch.Tensor, choices: int) -> torch.Tensor:
    """Returns a row of `tokens` `[tokens, width]` for each of some (token, choice) pairs, numbered
    `token * choices + choice`. The gradient of a token is the sum over its pairs."""
    return _TakePairs.apply(tokens, pairs, choices)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def sum_pairs(values: torch.Tensor, pairs: torch.Tensor, choices: int, count: int) -> torch.Tensor:
    """Sums the rows of `values` `[pairs, width]`, one for each (token, choice) pair, over the choices of each
    of `count` tokens: `[tokens, width]`. The order of the sum is that of the choices."""
    return _SumPairs.apply(values, pairs, choices, count)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
