"""The functions that rewritten code calls: kernels with the argument shapes of users' code, and plain ops
where a kernel does not fit.

Under tensor parallelism, tensors may be parts (`secc.runtime.tensor_parallel.rules.mark`). A kernel runs on a
part if it computes the rank's part of the result, which then gets the same mark; otherwise plain ops run, for
which there are rules. The names of these functions appear in the text of the IR.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from secc.runtime import kernels
from secc.runtime.context_parallel.row_marks import marked_tensors
from secc.runtime.context_parallel.row_mode import active_row_mode
from secc.runtime.tensor_parallel.rules.mark import ShardMark, mark_of, set_mark

__all__ = [
    "add_and_normalize",
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
    """Decorates an operator for arguments that are parts. It runs if only the first argument is a part, not
    cut along its last dim, or, with `elementwise`, if all arguments are cut in the same way; else `plain`
    runs."""

    def decorate(operator: TensorOperator) -> TensorOperator:
        @functools.wraps(operator)
        def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
            mode = active_row_mode()
            if mode is not None and next(marked_tensors((x, others)), None) is not None:
                return mode.apply_rule(run, (x, *others), {})
            first_mark, other_marks = mark_of(x), [mark_of(t) for t in others if isinstance(t, torch.Tensor)]
            if first_mark is None and not any(other_marks):
                return operator(x, *others)
            if first_mark is None or not (
                _have_same_marks(first_mark, other_marks)
                if elementwise
                else not any(other_marks) and first_mark.dim != x.dim() - 1
            ):
                return plain(x, *others)
            with torch._C.DisableTorchFunction():  # sizes are those of the part
                return set_mark(operator(x, *others), first_mark)

        return run

    return decorate


def _have_same_marks(first: ShardMark, others: list[ShardMark | None]) -> bool:
    return all(m is not None and (m.dim, m.parts) == (first.dim, first.parts) for m in others)


@_with_fallback(lambda gate, up: F.silu(gate) * up, elementwise=True)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up. `gate` and `up` have the same shape, which is the result's."""
    return kernels.swiglu(gate, up)


@_with_fallback(lambda gate, up, approximate: F.gelu(gate, approximate=approximate) * up, elementwise=True)
def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: Literal["none", "tanh"]) -> torch.Tensor:
    """Returns gelu(gate) * up. `gate` and `up` have the same shape, which is the result's."""
    return kernels.geglu(gate, up, approximate)


@dataclass
class _PendingSum:
    """A sum that the next norm of `x` is to compute; `total` is there once it has."""

    x: torch.Tensor
    residual: torch.Tensor
    total: torch.Tensor | None = None


_pending_sum: ContextVar[_PendingSum | None] = ContextVar("_pending_sum", default=None)


def add_and_normalize(
    left: torch.Tensor, right: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns left + right and its norm; `norm` is a module that takes its argument into one norm operator of
    this module. Both [..., H].

    The norm is called with `left` and finds `right` pending, so that one kernel reads both. Where it does not
    (parts of tensors, autocast, hooks, sums that broadcast or promote), the sum is computed first.
    """
    if _can_add_in_norm(left, right, norm):
        pending = _PendingSum(left, right)
        token = _pending_sum.set(pending)
        try:
            normed = norm(left)
        finally:
            _pending_sum.reset(token)
        if pending.total is not None:
            return pending.total, normed
    total = left + right
    return total, norm(total)


def _can_add_in_norm(left: Any, right: Any, norm: nn.Module) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    has_hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks  # pyright: ignore[reportPrivateUsage]
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and active_row_mode() is None
        and mark_of(left) is None
        and mark_of(right) is None
        and not _is_autocast_on(left)
        and not has_hooks
    )


def _normalize(
    x: torch.Tensor, kernel: Callable[[torch.Tensor | None], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Calls a norm's kernel with the residual that is pending for `x`, if any."""
    pending = _pending_sum.get()
    if pending is None or pending.x is not x or pending.total is not None:
        normed = kernel(None)
        assert isinstance(normed, torch.Tensor)
        return normed
    normed, pending.total = kernel(pending.residual)
    return normed


def _plain_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) if weight is None else weight * y.to(x.dtype)


def _plain_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@_with_fallback(_plain_rms_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    return _normalize(x, lambda residual: kernels.rms_norm(x, weight, eps, residual))


@_with_fallback(_plain_layer_norm)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""
    return _normalize(x, lambda residual: kernels.layer_norm(x, weight, bias, eps, residual))


@_with_fallback(_plain_layer_norm)
def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`F.layer_norm` over the last dim; under autocast torch's own, which decides the dtype of the result."""
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
    """Returns x * cos + rotate_half(x) * sin for tables that broadcast over heads. `x`: [B, heads, S, D], [B,
    S, heads, D] or, packed, [S, heads, D].

    Tables of another shape, and tables that require a gradient, take plain ops.
    """
    dim = _heads_dim(x, cos, sin)
    if dim is None:
        return _plain_rotation(x, cos, sin)
    is_packed = x.dim() == 3
    heads_first = x.transpose(-3, -2) if dim == x.dim() - 2 else x
    tables = (t.select(dim, 0).unsqueeze(0) if is_packed else t.select(dim, 0) for t in (cos, sin))
    rotated = kernels.rotate_one(heads_first.unsqueeze(0) if is_packed else heads_first, *tables)
    rotated = rotated.squeeze(0) if is_packed else rotated
    return rotated.transpose(-3, -2) if dim == x.dim() - 2 else rotated


def _heads_dim(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> int | None:
    """Returns the dim of heads, over which the tables broadcast; None if the kernel does not fit."""
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
    """Repeats a table given for one half: [..., R / 2] to [..., R]."""
    return torch.cat([table, table], -1)


def rotate_parts(a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns cat(a * cos - b * sin, b * cos + a * sin) along the last dim: `a` and `b` are the halves of a
    head as two tensors [..., R / 2], `cos` and `sin` tables of the same width."""
    return rotate(torch.cat([a, b], -1), twice(cos), twice(sin))
