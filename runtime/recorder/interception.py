"""Intercepts what the user's Python does while it is recorded: ops below the dispatcher, and calls that only
torch's Python surface shows.

`tolist`, `numpy` and `torch.tensor([tensors])` read values without dispatching an op that says so. `.data`
drops the gradient without any op. Hooks and `torch.autograd.grad` act when a gradient flows, which recorded
glue would not repeat.
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
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.model.deferred_scalar import DeferredScalar
from secc.runtime.recorder import nested_values
from secc.runtime.recorder.meta_rules import DEVICE_QUERY, run_with_rule
from secc.runtime.recorder.shortcuts import SHORTCUT_FUNCTIONS

_READER_KINDS: dict[Any, str] = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
}
_TENSOR_MAKERS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
_FORMATTERS = {torch.Tensor.__format__, torch.Tensor.__repr__}
_DATA_GETTER = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_SHAPELESS_GETTERS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_cuda", "is_meta", "layout")
}
_REFUSED_CALLS: dict[Any, str] = {
    torch.Tensor.register_hook: "a hook on a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "a hook on a tensor",
    torch.Tensor.backward: "backward()",
    torch.Tensor.retain_grad: "retain_grad()",
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
}


_HOOK_CALLS = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}


class FunctionListener(Protocol):
    """Receives the calls of users' autograd functions."""

    paused: bool

    def apply_function(self, cls: Any, args: Any, run: Callable[..., Any]) -> Any:
        """A `torch.autograd.Function` is applied where a gradient may flow; `run(*args)` applies it."""


class RecordingListener(FunctionListener, Protocol):
    """Receives what is intercepted. See `secc.runtime.recorder.recorder.Recorder`."""

    def on_glue_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen op outside of blocks."""

    def on_block_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen op inside a block."""

    def shortcut_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of one of the functions of `secc.runtime.recorder.shortcuts` inside a block."""

    def on_tensor_use(self, *values: Any) -> None:
        """Glue or Python uses these tensors in a way that may depend on their shapes."""

    def make_contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Glue calls `contiguous` of a tensor of any shape."""
        ...

    def on_read(self, kind: str, tensor: torch.Tensor) -> None:
        """Python reads the values of a tensor of any shape."""

    def read_scalar(self, tensor: torch.Tensor) -> Any:
        """Python reads the only value of a tensor, which may have any number of dims."""

    def pause_recording(self) -> Any:
        """Context in which nothing is recorded."""

    def on_idle_autocast(self) -> None:
        """Forward enters autocast for a device that this machine does not have."""

    def fail(self, message: str, remedy: str) -> NoReturn:
        """Raise for something that cannot be recorded between blocks."""
        ...


class OpInterceptor(TorchDispatchMode):
    """Intercepts every ATen op, below autograd."""

    def __init__(self, listener: RecordingListener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY and self._listener.paused:
            return run_with_rule(func, args, {})
        handle = self._listener.on_block_op if self._listener.paused else self._listener.on_glue_op
        return handle(func, args, kwargs or {})


class CallInterceptor(TorchFunctionMode):
    """Intercepts calls of torch's Python surface that ops do not show."""

    def __init__(self, listener: RecordingListener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._listener.paused:
            return (
                self._listener.shortcut_call(func, args, kwargs)
                if func in SHORTCUT_FUNCTIONS
                else func(*args, **kwargs)
            )
        if func not in _SHAPELESS_GETTERS:
            self._listener.on_tensor_use(args, kwargs)
        if func in _REFUSED_CALLS:
            remedy = (
                "move it into one of the model's modules, which is called as it is"
                if func in _HOOK_CALLS
                else "move it and the modules that it takes gradients of into one nn.Module"
            )
            self._listener.fail(
                f"forward uses {_REFUSED_CALLS[func]} between its modules, which cannot be recorded", remedy
            )
        if func == _DATA_GETTER:
            return args[0].detach()
        if func in _FORMATTERS:
            return f"tensor(shape={tuple(args[0].shape)})"
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return self._listener.make_contiguous(args[0])
        if func is torch.Tensor.item:
            return self._listener.read_scalar(args[0])
        if func in _READER_KINDS:
            return self._call_reader(_READER_KINDS[func], args[0], func, args, kwargs)
        if func in _TENSOR_MAKERS:
            return self._call_maker(func, args, kwargs)
        if func is torch.nn.functional.one_hot and (len(args) > 1 or "num_classes" in kwargs):
            return _make_one_hot(*args, **kwargs)
        return func(*args, **kwargs)

    def _call_reader(self, kind: str, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        self._listener.on_read(kind, tensor)
        with self._listener.pause_recording():
            return func(*args, **kwargs)

    def _call_maker(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor from Python data. The values of tensors inside the data are read."""
        data = args[1] if func is torch.Tensor.new_tensor else args[0] if args else kwargs.get("data")
        if isinstance(data, torch.Tensor):
            return func(*args, **kwargs)
        for leaf in pytree.tree_leaves(data):
            if isinstance(leaf, DeferredScalar):  # a fake tensor's `tolist` gives them
                leaf.refuse_read()
        inner_tensors = [t for _, t in nested_values.iter_tensors(data)]
        for t in inner_tensors:
            self._listener.on_read("tensor", t)
        if not inner_tensors:
            return func(*args, **kwargs)
        with self._listener.pause_recording():
            return func(*args, **kwargs)


def _make_one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Computes `F.one_hot`, for a given number of classes without looking at the values of `tensor`."""
    if num_classes <= 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    return tensor.unsqueeze(-1).eq(classes).to(torch.int64)


@contextmanager
def intercept_autograd_functions(listener: FunctionListener) -> Iterator[None]:
    """Report every `torch.autograd.Function` between blocks: its own backward would be lost below autograd.

    The class method `apply` is replaced for all Functions at once, since users keep it under names of their
    own (`reverse = Reverse.apply`).
    """
    original = torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return original.__get__(None, cls)(*args)

        differentiated = torch.is_grad_enabled() and any(
            t.requires_grad for _, t in nested_values.iter_tensors(args)
        )
        if cls is checkpoint.CheckpointFunction and not listener.paused:
            with torch.set_grad_enabled(
                differentiated
            ):  # without an argument that has a gradient it gives none to anything inside
                return args[0](*args[2:])
        if listener.paused or not differentiated or cls.__module__ == checkpoint.__name__:
            return run(*args)
        return listener.apply_function(cls, args, run)

    base: Any = torch.autograd.function._SingleLevelFunction
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


@contextmanager
def without_distribution_validation() -> Iterator[None]:
    """Keep `torch.distributions` from reading the values of their arguments, which is all that their
    checks do."""
    original = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(original)


@contextmanager
def intercept_idle_autocast(listener: RecordingListener) -> Iterator[None]:
    """Report autocast regions for CUDA on a machine without it, where they have no effect."""
    original = common.amp_definitely_not_available

    def report_if_idle() -> bool:
        idle = original()
        if idle:
            listener.on_idle_autocast()
        return idle

    common.amp_definitely_not_available = report_if_idle
    try:
        yield
    finally:
        common.amp_definitely_not_available = original


def intercept_module_calls(root: nn.Module, handle: Callable[[str, nn.Module, Any, Any], Any]) -> None:
    """Let `handle(path, module, args, kwargs)` replace every call of a submodule of `root`, hooks included.

    Only for a private copy of a model: the submodules stay changed.
    """
    for path, module in root.named_modules():
        if path:
            module._compiled_call_impl = _make_call_handler(handle, path, module)  # type: ignore[assignment]


def _make_call_handler(
    handle: Callable[[str, nn.Module, Any, Any], Any], path: str, module: nn.Module
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return handle(path, module, args, kwargs)

    return call
