"""What rewritten code calls: the kernels by the names and shapes of users' code, and that code's own way
where a kernel does not fit.

Under tensor parallelism tensors may be parts (`secc.runtime.tensor_parallel.rules.mark`). A kernel runs on a part
where that is its part of the result, and gives the result the part's mark; elsewhere plain ops run, which
have rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import functional as F

from secc.runtime import kernels
from secc.runtime.tensor_parallel.rules.mark import ShardMark, mark_of, set_mark

__all__ = [
    "geglu",
    "layer_norm",
    "rms_norm",
    "rotate",
    "rotate_parts",
    "swiglu",
    "torch_layer_norm",
    "torch_rms_norm",
    "twice",
]

TensorOperator = Callable[..., torch.Tensor]


def _with_fallback(
    plain: TensorOperator, elementwise: bool = False
) -> Callable[[TensorOperator], TensorOperator]:
    """For parts: the operator if the others are whole and the first is not cut along its last dim, or,
    `elementwise`, if all are cut alike; else `plain`."""

    def decorate(operator: TensorOperator) -> TensorOperator:
        @functools.wraps(operator)
        def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
            found, rest = mark_of(x), [mark_of(t) for t in others if isinstance(t, torch.Tensor)]
            if found is None and not any(rest):
                return operator(x, *others)
            if found is None or not (
                _have_same_marks(found, rest) if elementwise else not any(rest) and found.dim != x.dim() - 1
            ):
                return plain(x, *others)
            with torch._C.DisableTorchFunction():  # sizes are those of the part
                return set_mark(operator(x, *others), found)

        return run

    return decorate


def _have_same_marks(found: ShardMark, rest: list[ShardMark | None]) -> bool:
    return all(m is not None and (m.dim, m.parts) == (found.dim, found.parts) for m in rest)


@_with_fallback(lambda gate, up: F.silu(gate) * up, elementwise=True)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return kernels.swiglu(gate, up)


@_with_fallback(lambda gate, up, approximate: F.gelu(gate, approximate=approximate) * up, elementwise=True)
def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: Literal["none", "tanh"]) -> torch.Tensor:
    """gelu(gate) * up."""
    return kernels.geglu(gate, up, approximate)


def _plain_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) if weight is None else weight * y.to(x.dtype)


def _plain_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@_with_fallback(_plain_rms_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    y = kernels.rms_norm(x, weight, eps)
    assert isinstance(y, torch.Tensor)
    return y


@_with_fallback(_plain_layer_norm)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""
    y = kernels.layer_norm(x, weight, bias, eps)
    assert isinstance(y, torch.Tensor)
    return y


@_with_fallback(_plain_layer_norm)
def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`F.layer_norm` over the last dim; under autocast torch's own, which decides the result's dtype."""
    if _is_autocast_on(x):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return layer_norm(x, weight, bias, eps).to(x.dtype)


@_with_fallback(lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps))
def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`F.rms_norm` over the last dim; under autocast torch's own."""
    if _is_autocast_on(x):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return rms_norm(x, weight, eps).to(x.dtype)


def _is_autocast_on(x: torch.Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _plain_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@_with_fallback(_plain_rotation)
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, for tables that broadcast over heads: [B, heads, S, D], [B, S, heads,
    D] or, packed, [S, heads, D].

    Tables of another shape, and tables that get a gradient, take plain ops.
    """
    dim = _heads_dim(x, cos, sin)
    if dim is None:
        return _plain_rotation(x, cos, sin)
    lead = x.dim() == 3
    heads_first = x.transpose(-3, -2) if dim == x.dim() - 2 else x
    tables = (t.select(dim, 0).unsqueeze(0) if lead else t.select(dim, 0) for t in (cos, sin))
    y = kernels.rotate_one(heads_first.unsqueeze(0) if lead else heads_first, *tables)
    y = y.squeeze(0) if lead else y
    return y.transpose(-3, -2) if dim == x.dim() - 2 else y


def _heads_dim(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> int | None:
    """The dim of heads, over which the tables broadcast; None where the kernel does not fit."""
    if (
        cos.shape != sin.shape
        or cos.dim() != x.dim()
        or x.dim() not in (3, 4)
        or cos.requires_grad
        or sin.requires_grad
    ):
        return None
    if (
        x.shape[-1] != cos.shape[-1]
        or x.shape[-1] % 2
        or (x.dim() == 4 and cos.shape[0] not in (1, x.shape[0]))
    ):
        return None
    for dim, positions in ((x.dim() - 3, x.dim() - 2), (x.dim() - 2, x.dim() - 3)):
        if cos.shape[dim] == 1 and cos.shape[positions] == x.shape[positions]:
            return dim
    return None


def twice(table: torch.Tensor) -> torch.Tensor:
    """Both halves of a table that was given once: [..., R / 2] to [..., R]."""
    return torch.cat([table, table], -1)


def rotate_parts(a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """cat(a * cos - b * sin, b * cos + a * sin): halves that are two tensors, tables of half the width."""
    return rotate(torch.cat([a, b], -1), twice(cos), twice(sin))
