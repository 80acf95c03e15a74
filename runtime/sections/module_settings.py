"""Plain attributes that the user's forward sets on modules between calls: an adapter switched off, a teacher
put into eval mode.

A section calls the user's modules without that forward around them, so a call that found modules set
otherwise than `model()` left them is written with its settings, which hold for this call. A layer that runs
again in the backward (`recompute`) runs with those of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

ModuleSetting = tuple[
    Any, ...
]  # an attribute's name, its value, and the paths of the modules that have it: none for all that have one
ActiveSettings = tuple[tuple[nn.Module, tuple[ModuleSetting, ...]], ...]

_active_settings: ContextVar[ActiveSettings] = ContextVar("settings", default=())


@contextmanager
def apply_settings(module: nn.Module, *settings: ModuleSetting) -> Iterator[None]:
    """Set attributes of `module` and of modules in it, and set them back."""
    before: list[tuple[nn.Module, str, Any]] = []
    for name, value, *paths in settings:
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


def restore_attributes(before: list[tuple[nn.Module, str, Any]]) -> None:
    """Give modules' attributes the values that they had, the last one set first."""
    for module, name, value in reversed(before):
        setattr(module, name, value)


def bind_active_settings(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with the settings that hold now, whenever it runs."""
    held = _active_settings.get()
    if not held:
        return call

    def run(*args: Any) -> Any:
        before = _active_settings.get()
        return call(*args) if before == held else _call_with_settings(held, call, args)

    return run


def _call_with_settings(held: ActiveSettings, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The call under all of these settings."""
    if not held:
        return call(*args)
    (module, settings), *rest = held
    with apply_settings(module, *settings):
        return _call_with_settings(tuple(rest), call, args)
