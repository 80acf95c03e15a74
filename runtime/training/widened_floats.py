"""Runs code in wider floats than it asks for, so that a model in 16 bits is compared as strictly as one in
float32.

Rounding to bfloat16 hides errors of 1 %. So besides the comparison in a model's own dtypes, model and plan
run once more with float32 (or float64) in place of narrower floats: parameters and buffers are widened in
place, and below the dispatcher every op that asks for a narrow dtype gets the wide one. Casts that the user
wrote, casts of autocast and casts that a plan's glue recorded become no-ops by the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_GROUPED_MM = torch.ops.aten._grouped_mm.default


def narrower_floats(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Returns the floats that `dtype` stands in for: those of 16 bits, and float32 for float64."""
    return (*SIXTEEN_BITS, torch.float32) if dtype == torch.float64 else SIXTEEN_BITS


def computes_in_sixteen_bits(model: nn.Module) -> bool:
    """Whether parameters or buffers of the model have 16 bits."""
    return any(t.dtype in SIXTEEN_BITS for t in (*model.parameters(), *model.buffers()))


def is_missing_kernel(error: BaseException) -> bool:
    """Whether torch raised `error` because this machine's CPU has no kernel of an op for a 16-bit float."""
    return isinstance(error, (NotImplementedError, RuntimeError)) and bool(
        re.search(r"not implemented for '(Half|BFloat16)'", str(error))
    )


@contextmanager
def widened_floats(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which `model`, and all code that runs it, computes in `dtype` in place of narrower floats.

    Parameters stay the same objects, and have no gradients before and after.
    """
    narrow = narrower_floats(dtype)
    model.zero_grad(set_to_none=True)
    own = [
        (t, t.data) for t in (*model.parameters(), *model.buffers()) if t.dtype in narrow and not t.is_meta
    ]
    # Of parameters that accumulate gradients in another dtype than their own.
    gradients = [(p, p.grad_dtype) for p in model.parameters() if p.dtype != p.grad_dtype in narrow]
    try:
        for tensor, data in own:
            tensor.data = data.to(dtype)
        for parameter, _ in gradients:
            parameter.grad_dtype = dtype
        with _WidenedOps(dtype):
            yield
    finally:
        model.zero_grad(set_to_none=True)
        for tensor, data in own:
            tensor.data = data
        for parameter, gradient_dtype in gradients:
            parameter.grad_dtype = gradient_dtype


@contextmanager
def own_floats() -> Iterator[None]:
    """Context inside `widened_floats` in which ops have the dtypes that they ask for: glue is recorded as it
    was when the plan was made."""
    with _disable_current_modes():
        yield


def widen_batch(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the batch with its narrower floats in `dtype`."""
    narrow = narrower_floats(dtype)
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.dtype in narrow else v, dict(batch)
    )


class _WidenedOps(TorchDispatchMode):
    """Replaces narrow dtypes among an op's arguments, and narrow tensors that are not written to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._narrow = dtype, narrower_floats(dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # Autograd asks for a device while it holds the lock of a leaf; a cast would wait for this lock.
            return func(*args, **kwargs)
        if any(map(self._is_narrow, args)) or any(map(self._is_narrow, kwargs.values())):
            args, kwargs = tree_map(partial(self._widen, func._schema.is_mutable), (args, kwargs))
        if func is _GROUPED_MM and args[0].is_meta:  # torch knows its shapes for bfloat16 only
            narrow = [t.to(torch.bfloat16) for t in args[:2]]
            return func(*narrow, *args[2:], **kwargs | {"out_dtype": None}).to(self._dtype)
        if func is _GROUPED_MM and self._dtype == torch.float64:
            return _multiply_groups(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_narrow(self, value: Any) -> bool:
        """Whether an argument is, or is a list that has, a narrow tensor or dtype."""
        if isinstance(value, (list, tuple)):
            return any(map(self._is_narrow, value))
        dtype = value.dtype if isinstance(value, torch.Tensor) else value
        return isinstance(dtype, torch.dtype) and dtype in self._narrow

    def _widen(self, keeps_tensors: bool, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtype if value in self._narrow else value
        if isinstance(value, torch.Tensor) and value.dtype in self._narrow and not keeps_tensors:
            return value.to(self._dtype)
        return value


def _multiply_groups(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: None = None, out_dtype: None = None
) -> torch.Tensor:
    """Returns `aten._grouped_mm(a, b, offs)`, which torch cannot compute in float64: a product for each group
    of rows that ends at `offs[e]`. [T, K] and [E, K, N] give [T, N], [E, M, K] and [K, T] give [M, T], and
    [M, T] and [T, N] give [E, M, N]."""
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, g] @ b[g] for g in groups])
    if a.dim() == 2:
        found = a.new_zeros(len(a), b.shape[2])
        for e, g in enumerate(groups):
            found[g] = a[g] @ b[e]
        return found
    found = a.new_zeros(a.shape[1], b.shape[1])
    for e, g in enumerate(groups):
        found[:, g] = a[e] @ b[:, g]
    return found
