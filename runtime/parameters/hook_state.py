"""Keeps what a user's step hooks remember (counters, lists, averages) as it was while steps are tried.

A hook keeps such things in an object that it is a method of, in variables around it, or in those of its file.
What is found there is put back, in the same objects: numbers and texts, lists, dicts and sets, attributes of
objects of the hook's own file, numbers of modules, and small tensors. What a hook writes to a disk is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn, optim

_MOST_DEPTH = 6  # of containers and objects in each other
_MOST_ENTRIES = 1 << 16  # of a container or a tensor
# Models are large, and a trial has parameters and an optimizer of its own.
_LEFT_ALONE = (nn.Module, nn.Parameter, optim.Optimizer, type, ModuleType)


@contextmanager
def restored_hook_state(hooks: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Put back, after the steps inside, what `hooks` can reach and have changed."""
    saved = _SavedState()
    for hook in hooks:
        saved.save_hook(hook)
    try:
        yield
    finally:
        saved.restore_values()


def numbers_of_hooks(hooks: Iterable[Callable[..., Any]]) -> set[int]:
    """Returns the whole numbers that hooks can reach: in their code, around it and in what they keep."""
    saved = _SavedState()
    for hook in hooks:
        saved.save_hook(hook)
    return saved.numbers


class _SavedState:
    """What was reached, with functions that put it back, and the whole numbers among it."""

    def __init__(self) -> None:
        self.numbers = set[int]()
        self._seen = dict[int, Any]()  # by id, and so alive
        self._files = set[str]()  # modules that the hooks are defined in
        self._restores = list[Callable[[], object]]()

    def save_hook(self, hook: Any) -> None:
        """Save what a hook remembers."""
        inner = hook.func if isinstance(hook, partial) else hook
        named = inner if isinstance(inner, FunctionType | MethodType) else type(inner)
        if not str(named.__module__).startswith("torch."):
            self._files.add(named.__module__)
            self._save(hook, 0)

    def restore_values(self) -> None:
        """Put back what was saved."""
        for put_back in self._restores:
            put_back()

    def _save(self, value: Any, depth: int) -> None:
        is_module = isinstance(value, nn.Module)
        is_left_alone = isinstance(value, _LEFT_ALONE) and not is_module
        if depth > _MOST_DEPTH or is_left_alone or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if type(value) is int:
            self.numbers.add(value)
        if is_module:
            for module in value.modules():
                numbers = {n: v for n, v in vars(module).items() if isinstance(v, (int, float, str))}
                self._restores.append(partial(vars(module).update, numbers))
            inner: Iterable[Any] = ()
        elif isinstance(value, torch.Tensor):
            if value.numel() <= _MOST_ENTRIES and value.is_leaf and not value.is_meta:
                self._restores.append(partial(_put_back_entries, value, value.detach().clone()))
            inner = ()
        elif isinstance(value, list | dict | set) and len(value) <= _MOST_ENTRIES:
            self._restores.append(partial(_put_back_items, value, value.copy()))
            inner = list(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            inner = value
        elif isinstance(value, partial):
            inner = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            inner = (value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            inner = self._variables_of(value) if value.__module__ in self._files else ()
        elif type(value).__module__ in self._files and isinstance(getattr(value, "__dict__", None), dict):
            self._restores.append(partial(_put_back_items, value.__dict__, value.__dict__.copy()))
            inner = (*value.__dict__.values(), vars(type(value)).get("__call__"))
        else:
            inner = ()
        for item in inner:
            self._save(item, depth + 1)

    def _variables_of(self, function: FunctionType) -> Iterator[Any]:
        """Yield what the variables around a function hold, which are put back, and constants of its code."""
        yield from function.__code__.co_consts
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                self._restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                yield cell.cell_contents
        for name in function.__code__.co_names:
            if name in function.__globals__:
                value = function.__globals__[name]
                self._restores.append(partial(function.__globals__.__setitem__, name, value))
                yield value


def _put_back_items(container: Any, items: Any) -> None:
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.update(items)


def _put_back_entries(tensor: torch.Tensor, entries: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(entries)
