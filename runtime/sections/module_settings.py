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

Setting = tuple[
    Any, ...
]  # an attribute's name, its value, and the paths of the modules that have it: none for all that have one
Held = tuple[tuple[nn.Module, tuple[Setting, ...]], ...]

_held: ContextVar[Held] = ContextVar("settings", default=())


@contextmanager
def applied(module: nn.Module, *settings: Setting) -> Iterator[None]:
    """Set attributes of `module` and of modules in it, and set them back."""
    before: list[tuple[nn.Module, str, Any]] = []
    for name, value, *paths in settings:
        for m in [module.get_submodule(path) for path in paths] or [
            m for m in module.modules() if name in vars(m)
        ]:
            before.append((m, name, getattr(m, name)))
            setattr(m, name, value)
    token = _held.set((*_held.get(), (module, settings)))
    try:
        yield
    finally:
        _held.reset(token)
        restore(before)


def restore(before: list[tuple[nn.Module, str, Any]]) -> None:
    """Give modules' attributes the values that they had, the last one set first."""
    for module, name, value in reversed(before):
        setattr(module, name, value)


def lasting(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with the settings that hold now, whenever it runs."""
    held = _held.get()
    if not held:
        return call

    def run(*args: Any) -> Any:
        before = _held.get()
        return call(*args) if before == held else _within(held, call, args)

    return run


def _within(held: Held, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The call under all of these settings."""
    if not held:
        return call(*args)
    (module, settings), *rest = held
    with applied(module, *settings):
        return _within(tuple(rest), call, args)
