"""Computes results of common ops on fake tensors without `FakeTensorMode`, which checks each op first (is
anything constant, symbolic, on several devices, to be decomposed?). For a layer at new sizes these checks
take most of the time.

Views, casts and matrix products go to torch's kernel for the meta device. The result of an entrywise op on
contiguous tensors has their broadcast shape and is contiguous; its dtype is learned from torch, once per
choice of dtypes and scalars. Common reductions and
lookups on contiguous floats give contiguous ones, in shapes that the arguments give.
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
_ARITHMETIC_OPS = frozenset({aten.add, aten.sub, aten.mul, aten.div})
_EXCLUDED_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
)
_CPU = torch.device("cpu")
_REAL_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LAYER_NORM = aten.native_layer_norm.default  # its results are contiguous, whatever its argument is
_NO_REDUCTION = 0

Shape = tuple[int, ...]

_pointwise_dtypes: dict[Any, torch.dtype] = {}  # result dtypes of entrywise ops


def run_with_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(*args, **kwargs)`, by a rule if there is one."""
    if func is DEVICE_QUERY:  # autograd asks for it at each result, thousands of times in a loop over windows
        return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
    shapes_of = _RESULT_SHAPES.get(func)
    if shapes_of is not None and not kwargs and _is_plain_float(args[0]):
        is_known = func is _LAYER_NORM or args[0].stride() == contiguous_strides(args[0].shape)
        shapes = shapes_of(*args) if is_known else None
        if shapes is not None:
            return _make_results(args[0], shapes)
    rule = _find_rule(func)
    if rule is None or kwargs.get("device") is not None:
        return func(*args, **kwargs)
    tensors = _plain_tensors(args, kwargs, takes_real=rule is _run_pointwise)
    return rule(func, args, kwargs, tensors) if tensors else func(*args, **kwargs)


@cache
def _find_rule(func: Any) -> Callable[[Any, Any, Any, Sequence[torch.Tensor]], Any] | None:
    """Return the rule of an op; None for ops that write, or have results that layouts do not determine."""
    if func.namespace != "aten" or func._schema.is_mutable or any(tag in func.tags for tag in _EXCLUDED_TAGS):
        return None
    if func.is_view or func.overloadpacket in _META_KERNEL_OPS:
        return _run_meta_kernel
    return _run_pointwise if torch.Tag.pointwise in func.tags else None


def _plain_tensors(args: Any, kwargs: Any, takes_real: bool) -> list[torch.Tensor] | None:
    """Return the tensors among an op's arguments; None unless all are plain fake ones of one mode, or, with
    `takes_real`, real ones on the CPU next to at least one fake one."""
    tensors: list[torch.Tensor] = []
    mode: FakeTensorMode | None = None
    for value in (*args, *kwargs.values()):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, FakeTensor):
                if t.constant is not None or t.fake_device != _CPU or mode not in (None, t.fake_mode):
                    return None
                mode = t.fake_mode
                tensors.append(t)
            elif isinstance(t, torch.Tensor):
                if not takes_real or type(t) not in _REAL_TENSORS or t.device != _CPU:
                    return None
                tensors.append(t)
    return tensors if mode is not None else None


def _find_mode(tensors: Sequence[torch.Tensor]) -> FakeTensorMode:
    return next(t.fake_mode for t in tensors if isinstance(t, FakeTensor))


def _run_meta_kernel(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    mode = _find_mode(tensors)
    with torch._C.DisableTorchFunction():
        if not all(isinstance(t, FakeTensor) for t in tensors):
            args = tuple(_drop_values(a) if isinstance(a, torch.Tensor) else a for a in args)
        with in_kernel_invocation_manager(mode):
            out = func(*args, **kwargs)
        return (
            FakeTensor(mode, out, _CPU)
            if isinstance(out, torch.Tensor)
            else type(out)(FakeTensor(mode, t, _CPU) for t in out)
        )


def _drop_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout on the meta device; a fake one as it is."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_pointwise(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    shape = max(tensors, key=lambda t: (t.ndim, t.numel())).shape
    if not all(_broadcasts_to(t.shape, shape) and t.stride() == contiguous_strides(t.shape) for t in tensors):
        run = _run_meta_kernel if func.overloadpacket in _ARITHMETIC_OPS else None
        return func(*args, **kwargs) if run is None else run(func, args, kwargs, tensors)
    scalars = tuple(
        (k, repr(v)) for k, v in (*enumerate(args), *kwargs.items()) if not isinstance(v, torch.Tensor)
    )
    key = func, tuple((t.dtype, t.ndim == 0) for t in tensors), scalars, torch.get_default_dtype()
    if key in _pointwise_dtypes:
        return new_fake_tensor(_find_mode(tensors), shape, contiguous_strides(shape), _pointwise_dtypes[key])
    out = func(*args, **kwargs)
    if isinstance(out, FakeTensor) and out.shape == shape and out.stride() == contiguous_strides(shape):
        _pointwise_dtypes[key] = out.dtype
    return out


def _is_plain_float(value: Any) -> bool:
    """Whether an argument is a plain fake tensor of float32 or float64."""
    return (
        isinstance(value, FakeTensor)
        and value.constant is None
        and value.fake_device == _CPU
        and value.dtype in (torch.float32, torch.float64)
    )


def _make_results(like: FakeTensor, shapes: Shape | list[Shape]) -> Any:
    """Return a fake tensor of the dtype of `like`, or one for each of several shapes."""
    if isinstance(shapes, list):
        return tuple(_make_results(like, shape) for shape in shapes)
    return new_fake_tensor(like.fake_mode, shapes, contiguous_strides(shapes), like.dtype)


def _class_loss_shapes(
    scores: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
) -> list[Shape] | None:
    """Shapes of loss and sum of weights, for scores [N, classes] or [classes] and a target [N] or []."""
    if weight is not None or scores.ndim not in (1, 2) or target.shape != scores.shape[:-1]:
        return None
    return [tuple(target.shape) if reduction == _NO_REDUCTION else (), ()]


def _layer_norm_shapes(x: torch.Tensor, normalized: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Shapes of the normalised tensor, and of means and inverse deviations."""
    whole, over = tuple(x.shape), tuple(normalized)
    if not over or whole[-len(over) :] != over:
        return None
    if any(p is not None and (tuple(p.shape) != over or p.dtype != x.dtype) for p in (weight, bias)):
        return None
    statistics = (*whole[: -len(over)], *(1 for _ in over))
    return [whole, statistics, statistics]


def _mean_shape(x: torch.Tensor, dims: Any, keepdim: bool = False) -> Shape | None:
    if not dims or not all(-x.ndim <= d < x.ndim for d in dims):
        return None
    gone = {d % x.ndim for d in dims}
    sizes = ((1 if i in gone else n, i) for i, n in enumerate(x.shape))
    return tuple(n for n, i in sizes if keepdim or i not in gone) if len(gone) == len(dims) else None


def _embedding_shape(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> Shape | None:
    return (*indices.shape, weight.shape[1]) if weight.ndim == 2 else None


def _masked_scatter_shape(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Shape | None:
    fits = mask.dtype == torch.bool and source.dtype == x.dtype and _broadcasts_to(mask.shape, x.shape)
    return tuple(x.shape) if fits and mask.ndim <= x.ndim else None


def _softmax_shape(x: torch.Tensor, dim: int, half_to_float: bool) -> Shape | None:
    return tuple(x.shape) if -x.ndim <= dim < x.ndim and not half_to_float else None


_RESULT_SHAPES: dict[Any, Callable[..., Shape | list[Shape] | None]] = {
    aten.nll_loss_forward.default: _class_loss_shapes,
    _LAYER_NORM: _layer_norm_shapes,
    aten.masked_scatter.default: _masked_scatter_shape,
    aten.mean.dim: _mean_shape,
    aten.embedding.default: _embedding_shape,
    aten._softmax.default: _softmax_shape,
    aten._log_softmax.default: _softmax_shape,
}  # None: torch computes it


def _broadcasts_to(shape: torch.Size, wide: torch.Size) -> bool:
    """Whether a shape broadcasts to a wider one."""
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(wide), strict=False))
