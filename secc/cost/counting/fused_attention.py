"""Counts attention as one fused kernel: FLOPs of pairs that attend to each other, and no stored scores.

The kernel saves queries, keys, values, output and a log-sum (Dao et al., "FlashAttention", 2022). A block
that attends within samples or windows one by one is counted one by one.

Keys and values are what ranks exchange under context parallelism. Their bytes are counted without repetition:
where code repeats the heads of grouped queries, ranks exchange what is repeated
(`secc.runtime.context_parallel.row_marks`). Attention written as products of activations counts likewise: the
second factor of each product is exchanged. Calls of `scaled_dot_product_attention` can exchange heads of
queries and results instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_REPEATS_ATTRIBUTE = "_secc_repeats"  # how often a tensor holds each entry
_REPEATING_FUNCTIONS = frozenset({"expand", "expand_as", "repeat_interleave"})
_MOVING_FUNCTIONS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous"}
)
_PRODUCTS = {"matmul": 1, "__matmul__": 1, "bmm": 1, "baddbmm": 2}  # and the place of their second factor
MakeEmpty = Callable[[Sequence[int], torch.dtype], torch.Tensor]  # from size and dtype


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor (of any shape) is fake or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta  # properties pass through the modes


class FusedAttentionMode(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by a kernel that only has shapes, and takes truth values of
    tensors without values as true.

    count_flops: called with the FLOPs of each attention. count_exchanged: called with the bytes of keys and
    values, those of queries and results, and the heads of keys, without repetition; of other products with
    the bytes of second factors, none, and one head. is_weight: whether a tensor is a parameter or a view of
    one. make_empty: creates tensors without values.
    """

    def __init__(
        self,
        count_flops: Callable[[int], None],
        count_exchanged: Callable[[int, int, int], None],
        is_weight: Callable[[torch.Tensor], bool],
        make_empty: MakeEmpty,
    ) -> None:
        super().__init__()
        self._count_flops, self._count_exchanged = count_flops, count_exchanged
        self._is_weight, self._make_empty = is_weight, make_empty

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, key, value = (
                args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value"))
            )
            queries = query.shape[:-1].numel() * (query.shape[-1] + value.shape[-1]) * query.element_size()
            heads = key.shape[1] // getattr(key, _REPEATS_ATTRIBUTE, 1) if key.ndim == query.ndim == 4 else 1
            self._count_exchanged(_bytes_once(key) + _bytes_once(value), queries, heads)
            causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
            self._count_flops(
                2 * _count_attending_pairs(query, key, causal) * (query.shape[-1] + value.shape[-1])
            )
            return _FusedAttentionFunction.apply(self._make_empty, query, key, value)
        if func is torch.Tensor.__bool__ and has_no_values(args[0]):
            return True
        out, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name in _REPEATING_FUNCTIONS or name in _MOVING_FUNCTIONS:
            _note_repeats(out, args[0], name in _REPEATING_FUNCTIONS)
        elif name in _PRODUCTS and len(args) > _PRODUCTS[name]:
            factors = args[_PRODUCTS[name] - 1 : _PRODUCTS[name] + 1]
            if all(isinstance(t, torch.Tensor) and t.ndim > 2 and not self._is_weight(t) for t in factors):
                self._count_exchanged(_bytes_once(factors[1]), 0, 1)
        return out


def _note_repeats(out: torch.Tensor, source: torch.Tensor, repeating: bool) -> None:
    """Notes how often `out`, made from `source`, holds each entry."""
    repeats = getattr(source, _REPEATS_ATTRIBUTE, 1)
    if repeating and source.numel():
        repeats *= out.numel() // source.numel()
    if repeats > 1:
        setattr(out, _REPEATS_ATTRIBUTE, repeats)


def _bytes_once(tensor: torch.Tensor) -> int:
    """Bytes of the entries of a tensor, without repetition."""
    return tensor.numel() * tensor.element_size() // getattr(tensor, _REPEATS_ATTRIBUTE, 1)


def _count_attending_pairs(query: torch.Tensor, key: torch.Tensor, causal: bool) -> int:
    """The number of (query, key) pairs that attend, over batch and heads.

    query: [..., rows, head_dim]. key: [..., columns, head_dim]. causal: a query attends to its own and
    earlier positions.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    batch = query.shape[:-2].numel()
    if not causal:
        return batch * rows * columns
    causal_rows = min(rows, columns)
    return batch * (causal_rows * (causal_rows + 1) // 2 + (rows - causal_rows) * columns)


class _FusedAttentionFunction(torch.autograd.Function):
    """Shapes of fused attention, and the tensors it saves."""

    @staticmethod
    def forward(
        ctx: Any, empty: MakeEmpty, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = empty((*query.shape[:-1], value.shape[-1]), query.dtype)
        ctx.save_for_backward(query, key, value, out, empty(query.shape[:-1], torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("blocks run forward only while they are counted")
