"""Finds the user's hooks on gradients: of modules (`register_full_backward_hook`) and of parameters
(`Tensor.register_hook`).

On a rank they run as they are, once for each micro-batch. That is exact for hooks that only watch, and for
those that treat a sum of gradients as they treat its summands (a factor, a mask).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

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


def describe_hook(hook: Callable[..., Any]) -> tuple[str, str]:
    """Return a hook's name and its file:line, "" if it has no source."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = type(hook).__call__
    code = getattr(function, "__code__", None)
    name = getattr(hook, "__name__", type(hook).__name__)
    return name, "" if code is None else format_source_line(code, code.co_firstlineno)
