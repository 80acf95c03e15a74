"""Runs the user's forward hooks, which watch the results of modules (features of a teacher's layers) or
change them.

A recording runs the hooks of a block after its call, as glue, so that what they store or change is known.
Ranks therefore call blocks without them. Hooks that Hugging Face uses to collect results belong to the block
itself.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn

_COLLECTOR_MODULE = "transformers.utils.output_capturing"
# Hooks of these libraries (gradients for frozen embeddings) belong to the block itself.
_LIBRARY_PREFIXES = ("transformers.", "peft.", "accelerate.")


def is_output_collector(hook: Any) -> bool:
    """Whether a hook is one that Hugging Face uses to collect results for a caller."""
    return _module_name_of(hook) == _COLLECTOR_MODULE


def is_idle_collector(hook: Any) -> bool:
    """Whether a hook is such a collector, and the caller wants nothing now that it could collect: a model of
    Hugging Face's that is asked for hidden states has hooks for attention weights, too."""
    module = sys.modules.get(_COLLECTOR_MODULE)
    if module is None or not is_output_collector(hook):
        return False
    wanted = module._active_collector.get()
    enclosed = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    return wanted is None or ("key" in enclosed and enclosed["key"].cell_contents not in wanted)


def _module_name_of(hook: Any) -> str:
    return getattr(hook, "__module__", "") or ""


def user_forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the user's forward hooks of a module by their keys."""
    return {
        number: hook
        for number, hook in module._forward_hooks.items()
        if not _module_name_of(hook).startswith(_LIBRARY_PREFIXES)
    }


@contextmanager
def without_user_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the user's forward hooks of these modules, and put them back at the end."""
    before = [(m, m._forward_hooks) for m in modules if m._forward_hooks]
    for module, hooks in before:
        removed = user_forward_hooks(module)
        module._forward_hooks = type(hooks)(
            (number, hook) for number, hook in hooks.items() if number not in removed
        )
    try:
        yield
    finally:
        for module, hooks in before:
            module._forward_hooks = hooks


def run_forward_hooks(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """Return the result of a block's call after its hooks: `out` is what the module itself returned. Runs the
    user's hooks and the hooks that collect results for a caller outside the block."""
    user_hooks = user_forward_hooks(module)
    for number, hook in module._forward_hooks.items():
        if number not in user_hooks and not is_output_collector(hook):
            continue
        named = number in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, out) if named else hook(module, args, out)
        out = out if changed is None or is_output_collector(hook) else changed
    return out


def run_collector_hooks(module: nn.Module, args: Any, out: Any) -> None:
    """Run only the hooks that collect results for a caller."""
    for hook in filter(is_output_collector, module._forward_hooks.values()):
        hook(module, args, out)


def rebind_closures(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let hooks and other functions that a copied model holds refer to the copy, where they close over the
    original.

    `deepcopy` shares functions. `memo` is the dict that it filled.
    """
    for module in model.modules():
        for holder in (vars(module), module._forward_hooks, module._forward_pre_hooks):
            for key, value in list(holder.items()):
                if isinstance(value, types.FunctionType):
                    holder[key] = _rebind_function(value, memo)  # type: ignore[index]


def _rebind_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Copy a function with its closure and defaults replaced by those of the copied model."""
    if not function.__closure__ and not function.__defaults__ and not function.__kwdefaults__:
        return function
    cells = tuple(
        types.CellType(_copy_value(cell.cell_contents, memo)) for cell in function.__closure__ or ()
    )
    rebound = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        _copy_value(function.__defaults__, memo),
        cells or None,
    )
    rebound.__kwdefaults__ = _copy_value(function.__kwdefaults__, memo)
    rebound.__module__ = function.__module__
    return rebound


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copied model's version of a value. Values that cannot be copied are shared."""
    if isinstance(value, types.FunctionType):
        return _rebind_function(value, memo)
    if isinstance(value, tuple):
        return tuple(_copy_value(v, memo) for v in value)
    try:
        return deepcopy(value, memo)
    except Exception:
        return value
