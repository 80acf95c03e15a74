"""What a module returns that looks at values nobody has yet: which experts the tokens are sent to, which rows
a mask leaves.

It runs with made-up values in place of weights and arguments, twice with others. Where both results have one
layout, values decide what the tensors hold and not how large they are, which is all that a recording asks
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from secc.runtime.recorder import nested_values
from secc.runtime.recorder.block_results import BlockResult, ResultTensor, is_fake, result_skeleton

_RANDOM_RUN_SEEDS = (0, 1)


CallRunner = Callable[[Callable[[], Any]], tuple[Any, frozenset[int]]]


def layout_by_random_run(
    mode: FakeTensorMode, module: nn.Module, args: Any, kwargs: Any, runs: CallRunner
) -> tuple[Any, list[tuple[ResultTensor, torch.Tensor]]] | None:
    """The result of `module(*args, **kwargs)` without values, and the new tensors in it. None where values
    decide its layout too.

    `runs(call)` makes the call, and tells which tensors of its result are alone, by their ids. What the
    module raises is raised.
    """
    layouts, found = list[Any](), None
    for seed in _RANDOM_RUN_SEEDS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = {
                name: _random_state_tensor(t)
                for name, t in (*module.named_parameters(), *module.named_buffers())
            }
            given = nested_values.map_leaves((args, kwargs), lambda _, value: _random_value(value))
            out, alone = runs(lambda: functional_call(module, state, *given))
        found = result_skeleton(out, [t for _, t in nested_values.iter_tensors(given)], alone)
        layouts.append(nested_values.map_leaves(found, _leaf_layout))
    if found is None or layouts[0] != layouts[1]:
        return None
    return BlockResult(found, False, (), ()).build_fakes(
        mode, [t for _, t in nested_values.iter_tensors((args, kwargs))]
    )


def _random_state_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer with values. A large one's rows have one value each, which takes next to no
    memory."""
    if not is_fake(tensor):
        return tensor.detach().clone()
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return _random_value(tensor)
    rows = torch.randn(tensor.shape[0], *(1 for _ in tensor.shape[1:])).to(tensor.dtype)
    return rows.requires_grad_(tensor.requires_grad).expand(tensor.shape)


def _random_value(value: Any) -> Any:
    """A tensor with values in place of one without, no leaf of autograd; indices are 0, which is always
    one."""
    if not is_fake(value):
        return value
    if not value.is_floating_point() and not value.is_complex():
        made = torch.rand(value.shape) < 0.5 if value.dtype is torch.bool else torch.zeros(value.shape)
        return made.to(value.dtype)
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).normal_()
    return made.requires_grad_().clone() if value.requires_grad and torch.is_grad_enabled() else made


def _leaf_layout(_: str, leaf: Any) -> Any:
    return (
        (leaf.shape, leaf.dtype, leaf.requires_grad, leaf.argument_index, leaf.is_input_independent)
        if isinstance(leaf, ResultTensor)
        else leaf
    )
