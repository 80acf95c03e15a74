"""Finds the user's hooks on gradients: of modules (`register_full_backward_hook`) and of parameters
(`Tensor.register_hook`).

On a rank they run as they are, once for each micro-batch. That is exact for hooks that only watch, and for
those that treat a sum of gradients as they treat its summands (a factor, a mask).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from secc.runtime.model.source_lines import format_source_line

_MODULE_TABLES = ("_backward_hooks", "_backward_pre_hooks")
_PARAMETER_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
HookTable = MutableMapping[int, Callable[..., Any]]


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks on the gradients of a module's results and arguments."""
    return [hook for table in _MODULE_TABLES for hook in (getattr(module, table, None) or {}).values()]


def iter_gradient_hooks(model: nn.Module) -> Iterator[tuple[str, HookTable, int]]:
    """Iterate over all hooks on gradients of a model: name of the module or parameter, and the table that has
    the hook under a key."""
    owners = [*((n, m, _MODULE_TABLES) for n, m in model.named_modules())]
    owners += [(n, p, _PARAMETER_TABLES) for n, p in model.named_parameters()]  # type: ignore[misc]
    for name, owner, attributes in owners:
        for attribute in attributes:
            table = getattr(owner, attribute, None) or {}
            yield from ((name, table, key) for key in list(table))


@contextmanager
def only_gradient_hooks(model: nn.Module, kept: HookTable | None = None, key: int = -1) -> Iterator[None]:
    """Remove all hooks on gradients but the one that `kept` has under `key`; put them back at the end."""
    removed = [
        (table, k, table[k]) for _, table, k in iter_gradient_hooks(model) if not (table is kept and k == key)
    ]
    for table, k, _ in removed:
        del table[k]
    try:
        yield
    finally:
        for table, k, hook in removed:
            table[k] = hook


@contextmanager
def scaled_gradient_hooks(model: nn.Module, scale: float) -> Iterator[None]:
    """Give all hooks `scale` (a power of 2) times the gradients, and divide what they return: no change for
    hooks that treat a sum as its summands, and a bound that these gradients are too small to reach shows."""
    replaced = [(table, key, table[key]) for _, table, key in iter_gradient_hooks(model)]
    for table, key, hook in replaced:
        table[key] = _scale_hook(hook, scale)
    try:
        yield
    finally:
        for table, key, hook in replaced:
            table[key] = hook


@contextmanager
def scaled_backwards(functions: Iterable[type[torch.autograd.Function]], scale: float) -> Iterator[None]:
    """Do the same with the backwards of a user's `autograd.Function` classes, and with hooks that forward
    registers on tensors."""
    register, backwards = torch.Tensor.register_hook, [(f, vars(f)["backward"]) for f in functions]

    def register_scaled(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return register(tensor, _scale_hook(hook, scale))

    torch.Tensor.register_hook = register_scaled  # type: ignore[method-assign]
    for function, backward in backwards:
        function.backward = staticmethod(_scale_backward(backward.__func__, scale))  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        for function, backward in backwards:
            function.backward = backward  # type: ignore[method-assign]


def _scale_backward(backward: Callable[..., Any], scale: float) -> Callable[..., Any]:
    @functools.wraps(backward)
    def run_scaled(ctx: Any, *gradients: Any) -> Any:
        return _scale_tensors(backward(ctx, *_scale_tensors(gradients, scale)), 1 / scale)

    return run_scaled


def _scale_hook(hook: Callable[..., Any], scale: float) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run_scaled(*args: Any) -> Any:
        if isinstance(args[0], nn.Parameter):  # after its gradient has been added up
            args[0].grad = _scale_tensors(args[0].grad, scale)
            hook(args[0])
            args[0].grad = _scale_tensors(args[0].grad, 1 / scale)
            return None
        given = _scale_tensors(args, scale)
        found = hook(*given)
        if found is None and isinstance(args[0], torch.Tensor):
            found = given[0]  # which it may have changed
        return _scale_tensors(found, 1 / scale)

    return run_scaled


def _scale_tensors(value: Any, factor: float) -> Any:
    return tree_map(lambda t: t * factor if isinstance(t, torch.Tensor) else t, value)


def describe_hook(hook: Callable[..., Any]) -> tuple[str, str]:
    """Return a hook's name and its file:line, "" if it has no source."""
    hook = inspect.unwrap(hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = type(hook).__call__
    code = getattr(function, "__code__", None)
    name = getattr(hook, "__name__", type(hook).__name__)
    return name, "" if code is None else format_source_line(code, code.co_firstlineno)
