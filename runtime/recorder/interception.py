"""How the recorder sees what the user's Python does: ops below the dispatcher, and calls that only torch's
Python surface shows.

`tolist`, `numpy` and `torch.tensor([tensors])` read values without dispatching an op that says so; `.data`
drops the gradient without any op; hooks and `torch.autograd.grad` act when a gradient flows, which the
recorded glue would not repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.cuda.amp import common
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.recorder import nested_values
from secc.runtime.recorder.shortcuts import SHORT

DEVICE = torch.ops.prim.device.default
_READERS: dict[Any, str] = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
}
_MAKERS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
_TEXTS = {torch.Tensor.__format__, torch.Tensor.__repr__}
_DATA = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_SHAPELESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_cuda", "is_meta", "layout")
}
_REFUSED: dict[Any, str] = {
    torch.Tensor.register_hook: "a hook on a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "a hook on a tensor",
    torch.Tensor.backward: "backward()",
    torch.Tensor.retain_grad: "retain_grad()",
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
}


class Listener(Protocol):
    """What the modes tell: see `secc.runtime.recorder.recorder.Recorder`."""

    paused: bool

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen op outside of blocks."""

    def watch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen op inside a block."""

    def shorten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One of the functions in `secc.runtime.recorder.shortcuts` inside a block."""

    def touch(self, *values: Any) -> None:
        """Glue or Python does something with these tensors that may depend on their shapes."""

    def read(self, kind: str, tensor: torch.Tensor) -> None:
        """Python looks at the values of a tensor."""

    def number(self, tensor: torch.Tensor) -> Any:
        """Python asks for a tensor's one value."""

    def silence(self) -> Any:
        """A context in which nothing is recorded."""

    def idle_autocast(self) -> None:
        """Forward asks for autocast on a device that is not here."""

    def fail(self, message: str, remedy: str) -> NoReturn:
        """Raise for something that cannot be recorded in the open."""
        ...

    def function(self, cls: Any, args: Any, run: Callable[..., Any]) -> Any:
        """A `torch.autograd.Function` is applied where a gradient may flow; `run(*args)` applies it."""


class Ops(TorchDispatchMode):
    """Every ATen op, below autograd."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and self._listener.paused:
            return func(*args)  # autograd asks each result for it, of hundreds of windows alike
        handle = self._listener.watch if self._listener.paused else self._listener.dispatch
        return handle(func, args, kwargs or {})


class Calls(TorchFunctionMode):
    """The calls of torch's Python surface that ops do not show."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._listener.paused:
            return self._listener.shorten(func, args, kwargs) if func in SHORT else func(*args, **kwargs)
        if func not in _SHAPELESS:
            self._listener.touch(args, kwargs)
        if func in _REFUSED:
            remedy = "move it into one of the model's modules, which is called as it is"
            self._listener.fail(
                f"forward uses {_REFUSED[func]} between its modules, which cannot be recorded", remedy
            )
        if func == _DATA:
            return args[0].detach()
        if func in _TEXTS:
            return f"tensor(shape={tuple(args[0].shape)})"
        if func is torch.Tensor.item:
            return self._listener.number(args[0])
        if func in _READERS:
            return self._looked(_READERS[func], args[0], func, args, kwargs)
        if func in _MAKERS:
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def _looked(self, kind: str, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        self._listener.read(kind, tensor)
        with self._listener.silence():
            return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made from Python data: what tensors the data holds is read."""
        data = args[1] if func is torch.Tensor.new_tensor else args[0] if args else kwargs.get("data")
        if isinstance(data, torch.Tensor):
            return func(*args, **kwargs)
        found = [t for _, t in nested_values.tensors(data)]
        for t in found:
            self._listener.read("tensor", t)
        if not found:
            return func(*args, **kwargs)
        with self._listener.silence():
            return func(*args, **kwargs)


@contextmanager
def autograd_functions(listener: Listener) -> Iterator[None]:
    """Tell of every `torch.autograd.Function` between blocks: its own backward would be lost below autograd.

    `Function.apply` itself stays as it is, since users keep it under names of their own (`reverse =
    Reverse.apply`).
    """
    original = torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return original.__get__(None, cls)(*args)

        differentiated = torch.is_grad_enabled() and any(
            t.requires_grad for _, t in nested_values.tensors(args)
        )
        if cls is checkpoint.CheckpointFunction and not listener.paused:
            with torch.set_grad_enabled(
                differentiated
            ):  # without an argument that has a gradient it gives none to anything inside
                return args[0](*args[2:])
        if listener.paused or not differentiated or cls.__module__ == checkpoint.__name__:
            return run(*args)
        return listener.function(cls, args, run)

    base: Any = torch.autograd.function._SingleLevelFunction
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


@contextmanager
def unvalidated() -> Iterator[None]:
    """`torch.distributions` do not look at the values of their arguments, which is all that their checks
    do."""
    kept = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(kept)


@contextmanager
def idle_autocast(listener: Listener) -> Iterator[None]:
    """Tell of autocast regions for CUDA on a machine without it, where they do nothing."""
    original = common.amp_definitely_not_available

    def asked() -> bool:
        idle = original()
        if idle:
            listener.idle_autocast()
        return idle

    common.amp_definitely_not_available = asked
    try:
        yield
    finally:
        common.amp_definitely_not_available = original


def intercept(root: nn.Module, handle: Callable[[str, nn.Module, Any, Any], Any]) -> None:
    """Let `handle(path, module, args, kwargs)` take every call of a submodule of `root`, hooks included.

    Only for a model of one's own: the submodules stay changed.
    """
    for path, module in root.named_modules():
        if path:
            module._compiled_call_impl = _handler(handle, path, module)  # type: ignore[assignment]


def _handler(
    handle: Callable[[str, nn.Module, Any, Any], Any], path: str, module: nn.Module
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return handle(path, module, args, kwargs)

    return call
