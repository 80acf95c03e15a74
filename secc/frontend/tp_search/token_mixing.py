"""Finds mixtures of experts that give a token another result when other tokens come with it: a capacity for
the whole batch, tokens dropped by their position. No micro-batch computes these as the whole batch does. And
any blocks that give a sample another result when other samples come with it.

This only finds the words for what a comparison has refused, so that a message can name the line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from secc.frontend.tp_search.expert_cuts import mixture_sizes, record_first_calls
from secc.frontend.tp_search.find_mapping import ModuleCall
from secc.runtime.model.source_lines import format_source_line

TOLERANCE = 1e-3  # relative to the largest result: a dropped token differs by far more, rounding by far less


def find_token_mixing(root: nn.Module, call: ModuleCall) -> dict[str, str]:
    """Returns the source line of each mixture inside of `root` with results that depend on which tokens come
    together, by the module's path. Mixtures that `call` does not reach are left out."""
    mixtures = {path: m for path, m in root.named_modules() if mixture_sizes(m)}
    return {
        path: format_source_line(code, code.co_firstlineno)
        for path, inner in record_first_calls(root, call, mixtures).items()
        if _mixes_tokens(mixtures[path], inner)
        and (code := getattr(inspect.unwrap(type(mixtures[path]).forward), "__code__", None)) is not None
    }


def find_coupled_blocks(root: nn.Module, call: ModuleCall, paths: Iterable[str], samples: int) -> list[str]:
    """Returns the paths of modules inside of `root` that give a sample another result when other samples of
    the batch come with it, and of those with a part of the same class as what does so in them.

    Each is called with the arguments that it has when the whole batch passes, so that none is blamed for what
    stands before it. Modules with arguments that have no entry for each of the `samples` are left out.
    """
    inside = dict(root.named_modules())
    blocks = {path: inside[path] for path in paths if path in inside}
    parts = {p: m for path in blocks for p, m in inside.items() if f"{p}.".startswith(f"{path}.")}
    calls = {p: c for p, c in record_first_calls(root, call, parts).items() if _count_entries(c) == samples}
    coupled = {p for p, c in calls.items() if _mixes_tokens(parts[p], c)}
    innermost = {p for p in coupled if not any(other.startswith(f"{p}.") for other in coupled)}
    kinds = tuple({type(parts[p]) for p in innermost if not type(parts[p]).__module__.startswith("torch.")})
    return [
        path
        for path, block in blocks.items()
        if path in coupled or any(isinstance(m, kinds) for m in block.modules())
    ]


def _count_entries(call: ModuleCall) -> int:
    """The entries along dim 0 of the first tensor."""
    first = next((t for t in tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim()), None)
    return 0 if first is None else first.shape[0]


def _mixes_tokens(mixture: nn.Module, call: ModuleCall) -> bool:
    """Whether two halves of the entries along dim 0 give other results than all together."""
    try:
        count = next(t for t in tree_leaves(call) if isinstance(t, torch.Tensor)).shape[0]
        whole, again = (_run_rows(mixture, call, slice(None), count) for _ in range(2))
        joined = torch.cat([_run_rows(mixture, call, rows, count) for rows in _halves(count)])
    except Exception:  # the user's code fails on some of the rows, or its results cannot be joined
        return False
    scale = float(whole.detach().abs().max()) * TOLERANCE
    is_fixed = torch.allclose(whole, again, rtol=0.0, atol=scale)  # not where it draws random numbers
    same = joined.shape != whole.shape or torch.allclose(joined, whole, rtol=0.0, atol=scale)
    return is_fixed and not same


def _halves(count: int) -> Iterator[slice]:
    yield slice(0, count // 2)
    yield slice(count // 2, count)


def _run_rows(mixture: nn.Module, call: ModuleCall, rows: slice, count: int) -> torch.Tensor:
    """Returns the first result of floats for some entries of all tensors with `count` of them."""

    def pick(value: Any) -> Any:
        return value[rows] if isinstance(value, torch.Tensor) and value.shape[:1] == (count,) else value

    args, kwargs = tree_map(pick, call)
    with torch.no_grad():
        out = tree_leaves(mixture(*args, **kwargs))
    return next(t for t in out if isinstance(t, torch.Tensor) and t.is_floating_point())
