"""The places in a module where a kernel may stand: methods of its class, and functions that these call by
a global name.

Only code that multiplies or calls torch's own norms is worth a trace.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from secc.frontend.fusion.site_trace import has_hooks
from secc.runtime.model.source_lines import is_internal_file

_TORCH_NORMS = frozenset({"layer_norm", "rms_norm"})
_PROMISING_NAMES = _TORCH_NORMS | {
    "silu",
    "gelu",
    "sigmoid",
    "tanh",
    "rsqrt",
    "sqrt",
    "pow",
    "norm",
    "cat",
    "concat",
    "concatenate",
    "stack",
}
_ACTIVATION_NAME = re.compile(r"act|gate|silu|gelu")


def candidate_methods(cls: type) -> Iterator[str]:
    """Yields `forward`, then the other methods of a class that may compute what a kernel can, the class's
    own first."""
    if getattr(cls.forward, "__name__", "") == "_forward_unimplemented":
        return
    yield "forward"
    for base in _model_classes(cls):
        for name, value in vars(base).items():
            if (
                isinstance(value, FunctionType)
                and name != "forward"
                and not name.startswith("__")
                and may_compute_kernel(value)
            ):
                yield name


def candidate_functions(cls: type) -> dict[tuple[str, str], FunctionType]:
    """Returns the functions of tensors that a class's methods call by a global name, by (method, name)."""
    functions: dict[tuple[str, str], FunctionType] = {}
    for base in reversed(_model_classes(cls)):
        for method, value in vars(base).items():
            inner = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if isinstance(inner, FunctionType):
                functions |= {(method, name): function for name, function in _called_functions(inner)}
    return functions


def _model_classes(cls: type) -> list[type]:
    """Returns the base classes with the model's own code; a framework's base class of all models has none."""
    modules = [b for b in cls.__mro__ if issubclass(b, nn.Module) and not b.__module__.startswith("torch.")]
    return [b for b in modules if b.__name__ != "PreTrainedModel"]


def _called_functions(function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if (
            isinstance(value, FunctionType)
            and not is_internal_file(value.__code__.co_filename)
            and may_compute_kernel(value)
        ):
            yield name, value


@cache
def may_compute_kernel(function: FunctionType) -> bool:
    """Whether a function may compute what a kernel can: it, or a function it calls, multiplies and names
    an operation of a rule."""
    inner = (function.__globals__.get(n) for n in function.__code__.co_names)
    codes = [
        function.__code__,
        *(
            f.__code__
            for f in inner
            if isinstance(f, FunctionType) and not is_internal_file(f.__code__.co_filename)
        ),
    ]
    return any(map(_has_product, codes)) and any(
        n in _PROMISING_NAMES or _ACTIVATION_NAME.search(n) for code in codes for n in code.co_names
    )


def _has_product(code: CodeType) -> bool:
    """Whether code has a product or calls one of torch's norms."""
    if _TORCH_NORMS & set(code.co_names):
        return True
    return any(i.opname == "BINARY_OP" and i.argrepr in ("*", "*=") for i in dis.get_instructions(code))


def module_signature(module: nn.Module) -> Any:
    """Returns what determines a module's graphs apart from its plain attributes: class, tensors and direct
    children. It is equal for equal layers."""
    tensors_by_name = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    tensors = tuple((n, tuple(t.shape), t.dtype) for n, t in tensors_by_name)
    inside = tuple((n, type(m), _constant_attributes(m), has_hooks(m)) for n, m in module.named_children())
    return type(module), tensors, inside, frozenset(p.dtype for p in module.parameters())


def plain_attributes(module: nn.Module, names: Iterable[str] | None = None) -> frozenset[tuple[str, Any]]:
    """Returns (name, value) of a module's plain attributes with one of the names; all of them for None."""
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return frozenset((k, _comparable_value(v)) for k, v in plain.items() if names is None or k in names)


def _comparable_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_comparable_value, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value if isinstance(value, bool | int | float | str | None | torch.dtype) else id(value)


def _constant_attributes(module: nn.Module) -> Any:
    return tuple(
        (k, _comparable_value(v))
        for k, v in sorted(vars(module).items())
        if isinstance(v, bool | int | float | str)
    )
