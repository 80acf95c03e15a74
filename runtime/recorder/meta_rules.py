"""Computes results of common ops on fake tensors without `FakeTensorMode`, which checks each op first (is
anything constant, symbolic, on several devices, to be decomposed?). For a layer at new sizes these checks
take most of the time.

Views, casts and matrix products go to torch's kernel for the meta device. The result of an entrywise op on
contiguous tensors has their broadcast shape and is contiguous; its dtype is learned from torch, once per
choice of dtypes and scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from secc.runtime.recorder.block_results import contiguous_strides, new_fake_tensor

aten = torch.ops.aten
DEVICE_QUERY = torch.ops.prim.device.default
_META_KERNEL_OPS = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.clone, aten._to_copy})
_EXCLUDED_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
)
_CPU = torch.device("cpu")

_pointwise_dtypes: dict[Any, torch.dtype] = {}  # result dtypes of entrywise ops


def run_with_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(*args, **kwargs)`, by a rule if there is one."""
    if func is DEVICE_QUERY:  # autograd asks for it at each result, thousands of times in a loop over windows
        return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
    rule = _find_rule(func)
    tensors = _plain_fake_tensors(args, kwargs) if rule is not None and kwargs.get("device") is None else None
    return rule(func, args, kwargs, tensors) if rule is not None and tensors else func(*args, **kwargs)


@cache
def _find_rule(func: Any) -> Callable[[Any, Any, Any, Sequence[FakeTensor]], Any] | None:
    """Return the rule of an op; None for ops that write, or have results that layouts do not determine."""
    if func.namespace != "aten" or func._schema.is_mutable or any(tag in func.tags for tag in _EXCLUDED_TAGS):
        return None
    if func.is_view or func.overloadpacket in _META_KERNEL_OPS:
        return _run_meta_kernel
    return _run_pointwise if torch.Tag.pointwise in func.tags else None


def _plain_fake_tensors(args: Any, kwargs: Any) -> list[FakeTensor] | None:
    """Return the tensors among an op's arguments; None unless all are plain fake ones of one mode."""
    tensors: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if (
                isinstance(t, FakeTensor)
                and t.constant is None
                and t.fake_device == _CPU
                and (not tensors or t.fake_mode is tensors[0].fake_mode)
            ):
                tensors.append(t)
            elif isinstance(t, torch.Tensor):
                return None
    return tensors


def _run_meta_kernel(func: Any, args: Any, kwargs: Any, tensors: Sequence[FakeTensor]) -> Any:
    mode: FakeTensorMode = tensors[0].fake_mode
    with torch._C.DisableTorchFunction():
        with in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        return (
            FakeTensor(mode, out, _CPU)
            if isinstance(out, torch.Tensor)
            else type(out)(FakeTensor(mode, t, _CPU) for t in out)
        )


def _run_pointwise(func: Any, args: Any, kwargs: Any, tensors: Sequence[FakeTensor]) -> Any:
    shape = max(tensors, key=lambda t: (t.ndim, t.numel())).shape
    if not all(_broadcasts_to(t.shape, shape) and t.stride() == contiguous_strides(t.shape) for t in tensors):
        return func(*args, **kwargs)
    scalars = tuple(
        (k, repr(v)) for k, v in (*enumerate(args), *kwargs.items()) if not isinstance(v, torch.Tensor)
    )
    key = func, tuple((t.dtype, t.ndim == 0) for t in tensors), scalars, torch.get_default_dtype()
    if key in _pointwise_dtypes:
        return new_fake_tensor(tensors[0].fake_mode, shape, contiguous_strides(shape), _pointwise_dtypes[key])
    out = func(*args, **kwargs)
    if isinstance(out, FakeTensor) and out.shape == shape and out.stride() == contiguous_strides(shape):
        _pointwise_dtypes[key] = out.dtype
    return out


def _broadcasts_to(shape: torch.Size, wide: torch.Size) -> bool:
    """Whether a shape broadcasts to a wider one."""
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(wide), strict=False))
