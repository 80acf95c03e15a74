"""Attention's own rule: one fused kernel, whose FLOPs are those of the pairs that attend to each other, and
which never keeps the scores.

It keeps queries, keys, values, output and a log-sum. Samples and windows that a block attends to one by one
count one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

MakeEmpty = Callable[[Sequence[int], torch.dtype], torch.Tensor]  # makes a tensor without values


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values: it is fake, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta  # properties pass through the modes


class FusedAttentionMode(TorchFunctionMode):
    """Takes `scaled_dot_product_attention` as one kernel, and truth values of tensors without values as
    true."""

    def __init__(self, attend: Callable[[int], None], empty: MakeEmpty) -> None:
        super().__init__()
        self._count_flops, self._make_empty = attend, empty

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, key, value = (
                args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value"))
            )
            causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
            self._count_flops(
                2 * _count_attending_pairs(query, key, causal) * (query.shape[-1] + value.shape[-1])
            )
            return _FusedAttentionFunction.apply(self._make_empty, query, key, value)
        if func is torch.Tensor.__bool__ and has_no_values(args[0]):
            return True
        return func(*args, **kwargs)


def _count_attending_pairs(query: torch.Tensor, key: torch.Tensor, causal: bool) -> int:
    """Pairs that attend to each other, over batch and heads: with a causal mask, a query sees its own and
    earlier places."""
    rows, columns = query.shape[-2], key.shape[-2]
    over = query.shape[:-2].numel()
    if not causal:
        return over * rows * columns
    seen = min(rows, columns)
    return over * (seen * (seen + 1) // 2 + (rows - seen) * columns)


class _FusedAttentionFunction(torch.autograd.Function):
    """The shapes of a fused attention, and what it saves."""

    @staticmethod
    def forward(
        ctx: Any, empty: MakeEmpty, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = empty((*query.shape[:-1], value.shape[-1]), query.dtype)
        ctx.save_for_backward(query, key, value, out, empty(query.shape[:-1], torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("a trial runs forward only")
