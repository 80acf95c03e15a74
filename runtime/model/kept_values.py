"""What modules, their classes and the user's files keep: numbers and tensors in attributes, containers and
globals."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from secc.runtime.model.imported_code import find_user_file
from secc.runtime.model.user_file import UserModel

LIBRARIES = ("torch", "transformers", "diffusers", "timm", "peft", "accelerate")
MOST_ENTRIES = 64  # of a dict or a list that may be state; longer ones are tables
MOST_DEPTH = 3
PLAIN_ATTRIBUTES = frozenset(vars(nn.Module()))  # torch's own of any module
NUMBERS = (bool, int, float)
OF_FILE = " of "  # in the names of globals, before the name of a module other than the model file
_Cached = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True)
class KeptValue:
    """A number or a tensor that outlives a call: where it is kept, as messages say it, the path of the module
    that has it (None for a global or an attribute of a class), how it is read and replaced."""

    name: str
    owner: str | None
    read: Callable[[], Any]
    write: Callable[[Any], None]


def iter_values(model: nn.Module, user: UserModel) -> Iterator[KeptValue]:
    """Yields buffers, plain attributes and tensors of modules, and plain attributes of classes and globals of
    the user's files."""
    objects = set[int]()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else "self."
        for name, buffer in module.named_buffers(recurse=False):
            read = partial(getattr, module, name)
            yield KeptValue(prefix + name, path, read, _buffer_writer(buffer))
        own = {n: v for n, v in vars(module).items() if n not in PLAIN_ATTRIBUTES}
        for name in own:
            yield from _iter_entries(prefix + name, path, vars(module), name, objects)
    for cls in user_classes(model):
        for name, content in vars(cls).items():
            if isinstance(content, (*NUMBERS, torch.Tensor)) and not name.startswith("__"):
                read, write = partial(getattr, cls, name, None), partial(setattr, cls, name)
                yield KeptValue(f"{cls.__qualname__}.{name}", None, read, write)
    for file in user_files(model, user):
        where = "" if file is vars(user.module) else f"{OF_FILE}{file.get('__name__')}"
        for name in [n for n in file if not n.startswith("__")]:
            for value in _iter_entries(f"the global {name}", None, file, name, objects):
                yield replace(value, name=value.name + where)


def _iter_entries(
    name: str,
    owner: str | None,
    container: MutableMapping[Any, Any] | list[Any],
    key: Any,
    objects: set[int],
    depth: int = MOST_DEPTH,
) -> Iterator[KeptValue]:
    """Yields an entry of a dict or a list if it is a number or a tensor, else the numbers in it; those
    of an object (a configuration), too, unless it is in `objects`."""
    content = container[key]
    if isinstance(content, (*NUMBERS, torch.Tensor)) and not isinstance(content, nn.Parameter):
        yield KeptValue(name, owner, partial(_read, container, key), partial(container.__setitem__, key))
    elif isinstance(content, dict) and len(content) <= MOST_ENTRIES and depth:
        for inner in list(content):
            yield from _iter_entries(f"{name}[{inner!r}]", owner, content, inner, objects, depth - 1)
    elif isinstance(content, list) and len(content) <= MOST_ENTRIES and depth:
        for index in range(len(content)):
            yield from _iter_entries(f"{name}[{index}]", owner, content, index, objects, depth - 1)
    elif is_plain_object(content) and id(content) not in objects and depth:
        objects.add(id(content))
        for inner in list(vars(content)):
            yield from _iter_entries(f"{name}.{inner}", owner, vars(content), inner, objects, depth - 1)


def _read(container: Any, key: Any) -> Any:
    """Returns an entry of a dict or a list; None if it is not there any longer."""
    try:
        return container[key]
    except LookupError:
        return None


def _buffer_writer(buffer: torch.Tensor) -> Callable[[Any], None]:
    def write(value: torch.Tensor) -> None:
        with torch.no_grad():
            buffer.copy_(value)

    return write


def user_classes(model: nn.Module) -> list[type]:
    """Returns the classes of modules that are the user's own."""
    classes = (cls for m in model.modules() for cls in type(m).__mro__)
    return [c for c in dict.fromkeys(classes) if not c.__module__.startswith((*LIBRARIES, "builtins"))]


def user_files(model: nn.Module, user: UserModel) -> list[dict[str, Any]]:
    """Returns the globals of the model file, of the files that define its modules' classes, and of the user's
    files from which these have functions or modules."""
    own = (code for cls in user_classes(model) for code in vars(cls).values())
    waiting = [vars(user.module), *(c.__globals__ for c in own if isinstance(c, FunctionType))]
    files = dict[int, dict[str, Any]]()
    while waiting:
        file = waiting.pop(0)
        if id(file) not in files:
            files[id(file)] = file
            waiting += _imported_files(file)
    return list(files.values())


def _imported_files(file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the globals of the user's files from which one file has modules or functions."""
    names = {
        content.__name__ if isinstance(content, ModuleType) else getattr(content, "__module__", None)
        for content in file.values()
        if isinstance(content, (ModuleType, FunctionType)) or is_cached(content)
    }
    for name in names - {file.get("__name__")}:
        module = sys.modules.get(name or "")
        if module is not None and find_user_file(module) is not None:
            yield vars(module)


def is_plain_object(content: Any) -> bool:
    """Whether this is an object of a class of Python code that keeps attributes."""
    others = (type, nn.Module, ModuleType, FunctionType, torch.Tensor)
    return isinstance(getattr(content, "__dict__", None), dict) and not isinstance(content, others)


def is_cached(content: Any) -> bool:
    """Whether this is a function with a cache."""
    return isinstance(content, _Cached)
