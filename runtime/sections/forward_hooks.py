"""Forward hooks of the user's, which watch what a module gives (features of a teacher's layers) or change it.

A recording runs those of a block behind its call, as glue: what they keep or change is then known. So a rank
calls its blocks without them. Hooks with which Hugging Face gathers results are the block's own matter.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn

_COLLECTOR_MODULE = "transformers.utils.output_capturing"
_LIBRARY_PREFIXES = (
    "transformers.",
    "peft.",
    "accelerate.",
)  # their hooks (gradients for frozen embeddings) are the block's own matter


def is_output_collector(hook: Any) -> bool:
    """Whether a hook is one with which Hugging Face gathers results for a caller."""
    return _module_name_of(hook) == _COLLECTOR_MODULE


def _module_name_of(hook: Any) -> str:
    return getattr(hook, "__module__", "") or ""


def user_forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The user's forward hooks of a module, by number."""
    return {
        number: hook
        for number, hook in module._forward_hooks.items()
        if not _module_name_of(hook).startswith(_LIBRARY_PREFIXES)
    }


@contextmanager
def without_user_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Calls of these modules run none of the user's forward hooks."""
    before = [(m, m._forward_hooks) for m in modules if m._forward_hooks]
    for module, hooks in before:
        own = user_forward_hooks(module)
        module._forward_hooks = type(hooks)(
            (number, hook) for number, hook in hooks.items() if number not in own
        )
    try:
        yield
    finally:
        for module, hooks in before:
            module._forward_hooks = hooks


def run_forward_hooks(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """What the call of a block gives whose own result is `out`: its hooks are run, and those that gather for
    a caller in the open."""
    own = user_forward_hooks(module)
    for number, hook in module._forward_hooks.items():
        if number not in own and not is_output_collector(hook):
            continue
        named = number in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, out) if named else hook(module, args, out)
        out = out if changed is None or is_output_collector(hook) else changed
    return out


def run_collector_hooks(module: nn.Module, args: Any, out: Any) -> None:
    """Run only the hooks that gather."""
    for hook in filter(is_output_collector, module._forward_hooks.values()):
        hook(module, args, out)


def rebind_closures(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let hooks and other functions that a copied model keeps see the copy, where they close over the
    original.

    `deepcopy` shares functions. `memo` is that of the copy.
    """
    for module in model.modules():
        for holder in (vars(module), module._forward_hooks, module._forward_pre_hooks):
            for key, value in list(holder.items()):
                if isinstance(value, types.FunctionType):
                    holder[key] = _rebind_function(value, memo)  # type: ignore[index]


def _rebind_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """The function with what it closes over, and its defaults, as the copy has them."""
    if not function.__closure__ and not function.__defaults__ and not function.__kwdefaults__:
        return function
    cells = tuple(
        types.CellType(_copy_value(cell.cell_contents, memo)) for cell in function.__closure__ or ()
    )
    found = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        _copy_value(function.__defaults__, memo),
        cells or None,
    )
    found.__kwdefaults__ = _copy_value(function.__kwdefaults__, memo)
    found.__module__ = function.__module__
    return found


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """A value as the copy has it; what cannot be copied is shared."""
    if isinstance(value, types.FunctionType):
        return _rebind_function(value, memo)
    if isinstance(value, tuple):
        return tuple(_copy_value(v, memo) for v in value)
    try:
        return deepcopy(value, memo)
    except Exception:
        return value
