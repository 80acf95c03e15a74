"""Tracks plain attributes that the user's forward sets on modules while it is recorded; see
`secc.runtime.sections.module_settings`.

Only attributes set between blocks count: what a block sets when it runs, it sets on a rank too. Attributes
that did not exist before do not count either: they are a module's own memory. Whether parameters need
gradients is looked up at each call of a block. After each recording the modules are as `model()` left them,
which is how a rank has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from secc.runtime.sections.module_settings import (
    PARAMETERS_NEED_GRADIENTS,
    ModuleSetting,
    restore_attributes,
)

_PLAIN_TYPES = (bool, int, float, str, type(None))
_MAX_LIST_ENTRIES = 16  # longer lists are no settings


class SettingTracker:
    """The attributes that differ now from what they were when the model was made."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules, self._paths = modules, {id(m): path for path, m in modules.items()}
        self._original: dict[tuple[str, str], Any] = {}
        self._current: dict[tuple[str, str], Any] = {}
        self._parameters = dict[str, list[tuple[str, nn.Parameter]]]()  # by path of a block
        parameters = [p for m in modules.values() for p in m.parameters(recurse=False)]
        self._needs_gradient = {id(p): (p, p.requires_grad) for p in parameters}

    def note_setting(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that `module.name` is about to become `value`."""
        key = self._paths.get(id(module), ""), name
        if (
            key[0]
            and _is_plain_data(value)
            and name in vars(module)
            and _is_plain_data(before := vars(module)[name])
        ):
            self._original.setdefault(key, before)
            self._current[key] = value

    def settings_of_block(self, path: str) -> tuple[ModuleSetting, ...]:
        """Return the settings of the block at `path`."""
        by_value: dict[tuple[str, str], tuple[Any, list[str]]] = {}
        for (module, name), value in self._current.items():
            inside = module == path or module.startswith(f"{path}.")
            if inside and (type(value), value) != (
                type(self._original[module, name]),
                self._original[module, name],
            ):
                by_value.setdefault((name, repr(value)), (value, []))[1].append(module[len(path) + 1 :])
        return *(
            (name, value, *self._paths_unless_all(path, name, paths))
            for (name, _), (value, paths) in by_value.items()
        ), *self._gradient_settings(path)

    def _gradient_settings(self, path: str) -> Iterator[ModuleSetting]:
        """Yield the settings of parameters of the block that forward has frozen or thawed."""
        if path not in self._parameters:
            self._parameters[path] = list(self._modules[path].named_parameters())
        own = self._parameters[path]
        with (
            torch._C.DisableTorchFunction()
        ):  # reading an attribute is a call, which the recording intercepts
            changed = [(n, p.requires_grad) for n, p in own if self.is_changed(p)]
        for value in (False, True):
            names = [n for n, needs_gradient in changed if needs_gradient is value]
            if names:
                yield PARAMETERS_NEED_GRADIENTS, value, *(names if len(names) < len(own) else ())

    def is_changed(self, value: Any) -> bool:
        """Tell whether a value is a parameter that needs gradients now and did not when the model was made,
        or the other way round."""
        known = self._needs_gradient.get(id(value))
        return known is not None and value is known[0] and value.requires_grad is not known[1]

    def _paths_unless_all(self, path: str, name: str, paths: list[str]) -> list[str]:
        """Return the paths, or none if they are all modules in the block that have the attribute."""
        owners = sum(name in vars(m) for m in self._modules[path].modules())
        return [] if owners == len(paths) else paths

    def reset_modules(self) -> None:
        """Restore the attributes of all modules."""
        restore_attributes(
            [
                (self._modules[path], name, value)
                for (path, name), value in self._original.items()
                if (path, name) in self._current
            ]
        )
        self._current.clear()
        for parameter, value in self._needs_gradient.values():
            if parameter.requires_grad is not value:
                parameter.requires_grad_(value)


def _is_plain_data(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return (
            len(value) <= _MAX_LIST_ENTRIES
            and type(value) in (list, tuple)
            and all(map(_is_plain_data, value))
        )
    return type(value) in _PLAIN_TYPES


_watchers = list[Callable[[nn.Module, str, Any], None]]()


@contextmanager
def watch_attributes(note: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """Call `note(module, name, value)` for every attribute that is set on a module.

    `nn.Module.__setattr__` is replaced once and stays so: each change of it costs a millisecond or two, since
    Python visits all classes of modules that have been imported, and forgets which methods they have.
    """
    if not hasattr(nn.Module.__setattr__, "tells_watchers"):
        _tell_watchers()
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


def _tell_watchers() -> None:
    original = nn.Module.__setattr__

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        for note in _watchers:
            note(self, name, value)
        original(self, name, value)

    set_attribute.tells_watchers = True  # type: ignore[attr-defined]
    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
