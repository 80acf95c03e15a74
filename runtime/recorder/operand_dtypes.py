"""Refuses matrix products of tensors in different dtypes. PyTorch does so where tensors have values; without
values it computes a result's layout, and a plan would fail in its first step."""

from __future__ import annotations

from typing import Any

import torch

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def require_one_dtype(func: Any, args: Any) -> None:
    """Raises RuntimeError if `func` multiplies tensors of different dtypes."""
    if func not in _PRODUCTS:
        return
    dtypes = list(
        dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in args if isinstance(t, torch.Tensor))
    )
    if len(dtypes) > 1:
        name = func.overloadpacket.__name__
        raise RuntimeError(f"{name} multiplies tensors of different dtypes: {' and '.join(dtypes)}")
