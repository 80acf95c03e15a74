"""What modules, their classes and the user's files keep: numbers and tensors in attributes, containers and
globals."""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
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
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
_Cached = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True)
class KeptValue:
    """What outlives a call: where it is kept, as messages say it, the path of the module that has it (None
    for a global or an attribute of a class or a function), how it is read and replaced."""

    name: str
    owner: str | None
    read: Callable[[], Any]
    write: Callable[[Any], None]


def iter_values(model: nn.Module, user: UserModel) -> Iterator[KeptValue]:
    """Yields the numbers and tensors among `iter_contents`."""
    kept = (*NUMBERS, torch.Tensor)
    for value in iter_contents(model, user):
        content = value.read()
        if isinstance(content, kept) and not isinstance(content, nn.Parameter):
            yield value


def iter_contents(model: nn.Module, user: UserModel) -> Iterator[KeptValue]:
    """Yields what outlives a call: buffers and attributes of modules, attributes of classes and functions,
    variables of outer functions, defaults of arguments and globals of the user's files, and what lists,
    dicts and plain objects among these hold. No two have one name: later ones of a name get a number."""
    count_of_name = Counter[str]()
    for value in _iter_places(model, user):
        count_of_name[value.name] += 1
        number = count_of_name[value.name]
        yield value if number == 1 else replace(value, name=f"{value.name} ({number})")


def _iter_places(model: nn.Module, user: UserModel) -> Iterator[KeptValue]:
    """Yields what outlives a call. Functions that one line makes have one name."""
    objects = set[int]()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else "self."
        for name, _ in module.named_buffers(recurse=False):
            read, write = partial(getattr, module, name), partial(_write_buffer, module, name)
            yield KeptValue(prefix + name, path, read, write)
        own = {n: v for n, v in vars(module).items() if n not in PLAIN_ATTRIBUTES}
        for name in own:
            yield from _iter_entries(_entry(prefix + name, path, vars(module), name), objects)
    files = user_files(model, user)
    own = (c for f in files for c in f.values() if isinstance(c, type) and c.__module__ == f.get("__name__"))
    for cls in dict.fromkeys((*user_classes(model), *own)):
        for name in [n for n in vars(cls) if not n.startswith("__")]:
            place = KeptValue(
                f"{cls.__qualname__}.{name}",
                None,
                partial(_read, vars(cls), name),
                partial(setattr, cls, name),
            )
            yield from _iter_entries(place, objects)
    for function in user_functions(model, user):
        for place in _places_of_function(function):
            yield from _iter_entries(place, objects)
    for file in files:
        where = "" if file is vars(user.module) else f"{OF_FILE}{file.get('__name__')}"
        for name in [n for n in file if not n.startswith("__")]:
            for value in _iter_entries(_entry(f"the global {name}", None, file, name), objects):
                yield replace(value, name=value.name + where)


def _places_of_function(function: FunctionType) -> Iterator[KeptValue]:
    """Yields the attributes of a function, the variables of outer functions that it uses, and the defaults of
    its arguments."""
    own = function.__qualname__.replace("<locals>.", "")
    for name in list(vars(function)):
        yield _entry(f"{own}.{name}", None, vars(function), name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if is_filled(cell):
            read, write = partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
            yield KeptValue(f"{own}.{name}", None, read, write)
    for name in list(function.__kwdefaults__ or {}):
        yield _entry(f"{own}.{name}", None, function.__kwdefaults__ or {}, name)
    defaults = KeptValue(
        f"{own}.__defaults__", None, lambda: function.__defaults__, partial(setattr, function, "__defaults__")
    )
    yield from _iter_tuple(defaults, function.__defaults__ or ())


def _entry(
    name: str, owner: str | None, container: MutableMapping[Any, Any] | MutableSequence[Any], key: Any
) -> KeptValue:
    return KeptValue(name, owner, partial(_read, container, key), partial(container.__setitem__, key))


def _iter_tuple(place: KeptValue, content: tuple[Any, ...]) -> Iterator[KeptValue]:
    """Yields the entries of a tuple, which is replaced where one of them is."""

    def write_entry(index: int, entry: Any) -> None:
        now = place.read()
        entries = (*now[:index], entry, *now[index + 1 :])
        place.write(now._make(entries) if hasattr(now, "_make") else type(now)(entries))

    for index in range(len(content)):
        read, write = partial(lambda i: place.read()[i], index), partial(write_entry, index)
        yield KeptValue(f"{place.name}[{index}]", place.owner, read, write)


def _iter_entries(place: KeptValue, objects: set[int], depth: int = MOST_DEPTH) -> Iterator[KeptValue]:
    """Yields what a place holds, and what is in it: entries of a short container, attributes of an object (a
    configuration), unless it is in `objects`."""
    content, name, owner = place.read(), place.name, place.owner
    yield place
    inner = list[KeptValue]()
    if not depth or isinstance(content, (*NUMBERS, str, torch.Tensor)):
        return
    if isinstance(content, (dict, list, tuple, deque)):
        if len(content) > MOST_ENTRIES:
            return
        if isinstance(content, dict):
            inner = [_entry(f"{name}[{_key_text(key)}]", owner, content, key) for key in content]
        elif isinstance(content, tuple):
            inner = list(_iter_tuple(place, content))
        else:
            inner = [_entry(f"{name}[{index}]", owner, content, index) for index in range(len(content))]
    elif isinstance(content, ContextVar):
        inner = [
            KeptValue(f"{name}.get()", owner, partial(content.get, None), partial(_set_variable, content))
        ]
    elif isinstance(content, functools.partial):
        inner = _parts_of_partial(place, content)
    elif _is_method_of_object(content):
        rebind = partial(_write_method, place, content.__name__)
        inner = [KeptValue(f"{name}.__self__", owner, partial(getattr, content, "__self__"), rebind)]
    elif id(content) not in objects:
        if is_plain_object(content):
            inner = [_entry(f"{name}.{key}", owner, vars(content), key) for key in vars(content)]
        for slot in _slots(content):
            read, write = partial(getattr, content, slot, None), partial(setattr, content, slot)
            inner.append(KeptValue(f"{name}.{slot}", owner, read, write))
        if inner:
            objects.add(id(content))
    for entry in inner:
        yield from _iter_entries(entry, objects, depth - 1)


def _set_variable(variable: ContextVar[Any], content: Any) -> None:
    variable.set(content)


def _key_text(key: Any) -> str:
    """Returns what names a key in messages: for an object its class, as addresses differ from run to run."""
    return repr(key) if isinstance(key, (*NUMBERS, str, bytes, tuple)) else f"a {type(key).__name__}"


def _parts_of_partial(place: KeptValue, content: functools.partial[Any]) -> list[KeptValue]:
    """Returns the arguments of a `functools.partial`, which is replaced where one of them is."""

    def write_arguments(arguments: tuple[Any, ...]) -> None:
        place.write(functools.partial(content.func, *arguments, **content.keywords))

    positional = KeptValue(f"{place.name}.args", place.owner, lambda: content.args, write_arguments)
    named = [_entry(f"{place.name}.{key}", place.owner, content.keywords, key) for key in content.keywords]
    return [*_iter_tuple(positional, content.args), *named]


def _is_method_of_object(content: Any) -> bool:
    """Whether this is a method of a certain object, such as a generator of random numbers."""
    others = (type(None), type, nn.Module, ModuleType, torch.Tensor)
    return isinstance(content, _METHODS) and not isinstance(content.__self__, others)


def _write_method(place: KeptValue, name: str, owner: Any) -> None:
    """Puts the same method of another object in a place."""
    place.write(getattr(owner, name))


def _slots(content: Any) -> list[str]:
    """Returns the names of the slots of an object of a class of Python code that has some."""
    return (
        []
        if isinstance(content, type)
        else [
            name
            for cls in type(content).__mro__
            if isinstance(names := vars(cls).get("__slots__"), (tuple, list))
            for name in names
            if isinstance(name, str) and not name.startswith("__")
        ]
    )


def _read(container: Any, key: Any) -> Any:
    """Returns an entry of a container; None if it is not there any longer."""
    try:
        return container[key]
    except LookupError:
        return None


def is_filled(cell: CellType) -> bool:
    """Whether a variable of an outer function has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def user_functions(model: nn.Module, user: UserModel) -> Iterator[FunctionType]:
    """Yields the functions and methods of the user's files, which may keep values in attributes, in defaults
    of arguments and in variables of outer functions."""
    files = user_files(model, user)
    for names in (*files, *map(vars, user_classes(model))):
        for function in names.values():
            if isinstance(function, FunctionType) and any(function.__globals__ is file for file in files):
                yield function


def _write_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Writes to the buffer of this name, which may be another tensor than before."""
    with torch.no_grad():
        module.get_buffer(name).copy_(value)


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
