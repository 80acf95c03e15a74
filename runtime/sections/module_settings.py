"""Sets plain attributes of modules as the user's forward had set them: an adapter switched off, a teacher put
into eval mode. So are parameters that forward froze, or thawed, for some of its calls: a critic through which
the actor's loss sends gradients to the actor alone.

A section calls the user's modules without that forward around them. So a call for which forward had changed
attributes is generated with these settings, which hold for the call only. A layer that runs again in the
backward (`recompute`) runs with the settings of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

# (attribute, value, *paths of modules); without paths, all modules that have the attribute are meant.
ModuleSetting = tuple[Any, ...]
# In place of an attribute: whether parameters need gradients; the paths are those of parameters then.
PARAMETERS_NEED_GRADIENTS = "parameters.requires_grad"
ActiveSettings = tuple[tuple[nn.Module, tuple[ModuleSetting, ...]], ...]

_active_settings: ContextVar[ActiveSettings] = ContextVar("settings", default=())


@contextmanager
def apply_settings(module: nn.Module, *settings: ModuleSetting) -> Iterator[None]:
    """Set attributes of `module` and of modules in it, and restore them at the end."""
    before: list[tuple[nn.Module | nn.Parameter, str, Any]] = []
    for name, value, *paths in settings:
        if name == PARAMETERS_NEED_GRADIENTS:
            for p in [module.get_parameter(path) for path in paths] or module.parameters():
                before.append((p, "requires_grad", p.requires_grad))
                p.requires_grad_(value)
            continue
        for m in [module.get_submodule(path) for path in paths] or [
            m for m in module.modules() if name in vars(m)
        ]:
            before.append((m, name, getattr(m, name)))
            setattr(m, name, value)
    token = _active_settings.set((*_active_settings.get(), (module, settings)))
    try:
        yield
    finally:
        _active_settings.reset(token)
        restore_attributes(before)


def restore_attributes(before: Sequence[tuple[nn.Module | nn.Parameter, str, Any]]) -> None:
    """Restore (module or parameter, attribute, value) triples in reverse order."""
    for owner, name, value in reversed(before):
        setattr(owner, name, value)


def bind_active_settings(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` bound to the settings that are active now, whenever it runs later."""
    active = _active_settings.get()
    if not active:
        return call

    def run(*args: Any) -> Any:
        before = _active_settings.get()
        return call(*args) if before == active else _call_with_settings(active, call, args)

    return run


def _call_with_settings(active: ActiveSettings, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call with all of these settings applied."""
    if not active:
        return call(*args)
    (module, settings), *rest = active
    with apply_settings(module, *settings):
        return _call_with_settings(tuple(rest), call, args)
