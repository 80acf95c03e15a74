"""What rewritten code calls: the kernels by the names and shapes of users' code, and that code's own way where a kernel does not fit."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from secc.runtime.kernels.gated import geglu, swiglu
from secc.runtime.kernels.norms import layer_norm, rms_norm
from secc.runtime.kernels.rotary import rotated

__all__ = ["geglu", "layer_norm", "rms_norm", "rotate", "rotate_parts", "swiglu", "torch_layer_norm", "torch_rms_norm", "twice"]


def _autocasts(x: torch.Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def torch_layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`F.layer_norm` over the last dim; under autocast torch's own, which decides the result's dtype."""
    if _autocasts(x):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = layer_norm(x, weight, bias, eps)
    assert isinstance(y, torch.Tensor)
    return y.to(x.dtype)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`F.rms_norm` over the last dim; under autocast torch's own."""
    if _autocasts(x):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    y = rms_norm(x, weight, eps)
    assert isinstance(y, torch.Tensor)
    return y.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, for tables that broadcast over heads: [B, heads, S, D], [B, S, heads, D] or, packed, [S, heads, D].

    Tables of another shape, and tables that get a gradient, take plain ops.
    """
    dim = _heads(x, cos, sin)
    if dim is None:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin
    lead = x.dim() == 3
    heads_first = x.transpose(-3, -2) if dim == x.dim() - 2 else x
    tables = (t.select(dim, 0).unsqueeze(0) if lead else t.select(dim, 0) for t in (cos, sin))
    y = rotated(heads_first.unsqueeze(0) if lead else heads_first, *tables)
    y = y.squeeze(0) if lead else y
    return y.transpose(-3, -2) if dim == x.dim() - 2 else y


def _heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> int | None:
    """The dim of heads, over which the tables broadcast; None where the kernel does not fit."""
    if cos.shape != sin.shape or cos.dim() != x.dim() or x.dim() not in (3, 4) or cos.requires_grad or sin.requires_grad:
        return None
    if x.shape[-1] != cos.shape[-1] or x.shape[-1] % 2 or (x.dim() == 4 and cos.shape[0] not in (1, x.shape[0])):
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
