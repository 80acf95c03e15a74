"""What a model keeps before forward has run for the first time.

A block may keep a value of its first batch (`if self.scale is None: self.scale = h.std()`). Whatever runs
later sees the value and never a change of it, so a comparison has to begin where a run does: with modules,
classes and globals as the model file makes them.
"""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from secc.driver.cached_functions import CachedFunction, find_cached_functions
from secc.runtime.model.kept_values import (
    MOST_DEPTH,
    MOST_ENTRIES,
    PLAIN_ATTRIBUTES,
    is_filled,
    is_plain_object,
    user_classes,
    user_files,
    user_functions,
)
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import Plan

_HOOKS = [n for n in sorted(PLAIN_ATTRIBUTES) if n.startswith(("_forward_hooks", "_forward_pre_hooks"))]
# transformers lets its modules collect results when one of them is called first; that computes nothing.
_COLLECTING_FILE = "transformers.utils.output_capturing"
_COLLECTING_FLAG = "_output_capturing_hooks_installed"
_CONTAINERS = (dict, list, set, deque)
_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any] | type


class StartState:
    """What the modules of a model (none for the meta model's, `with_modules=False`), their classes and the
    globals of the user's files keep now. Parameters are left out without `with_parameters`."""

    def __init__(
        self, model: nn.Module, user: UserModel, with_modules: bool = True, with_parameters: bool = True
    ) -> None:
        self._model, self._user = model, user
        containers = list(_iter_containers(model, user, with_modules))
        self._entries = [(owner, c, _read(c)) for owner, c in containers]
        arrays = ((owner, a) for owner, _, entries in self._entries for a in _arrays(entries))
        self._arrays = [(owner, a, _clone(a)) for owner, a in arrays]
        self._caches = [(f, f.has_results) for f in find_cached_functions(user_files(model, user))]
        self._sums = _sum_parameters(model) if with_modules and with_parameters else {}

    def is_changed(self) -> bool:
        """Whether anything is kept otherwise than at the start."""
        return self.has_other_values() or _sum_parameters(self._model) != self._sums

    def has_other_values(self) -> bool:
        """Whether anything but parameters is kept otherwise than at the start."""
        return (
            any(not _have_equal_entries(_read(c), start) for _, c, start in self._entries)
            or any(not are_equal(a, start) for _, a, start in self._arrays)
            or bool(self.filled_caches)
        )

    @property
    def filled_caches(self) -> list[CachedFunction]:
        """The user's functions with a cache (`functools.lru_cache`) that had no results at the start and have
        some now."""
        return [f for f, had_results in self._caches if f.at_present.has_results and not had_results]

    @torch.no_grad()
    def restore_values(self, left_out: Collection[str] = ()) -> None:
        """Gives everything what it held, except for parameters and modules in the blocks `left_out`."""
        for owner, container, start in self._entries:
            if not is_in_any(owner, left_out) and not _have_equal_entries(_read(container), start):
                _write(container, start)
        for owner, array, start in self._arrays:
            if not is_in_any(owner, left_out) and not are_equal(array, start):
                array[...] = start
        for cached, had_results in self._caches:
            cached.restore_function(had_results)

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Gives parameters that have changed what `model()` gives them."""
        now = _sum_parameters(self._model)
        changed = {name for name, total in self._sums.items() if now.get(name) != total}
        if not changed:
            return
        torch.manual_seed(0)
        names = dict(vars(self._user.module))
        with contextlib.redirect_stdout(io.StringIO()):
            built = dict(self._user.build_model().named_parameters())
        vars(self._user.module).update(names)  # `model()` may keep the model in a global
        for name, parameter in self._model.named_parameters():
            if name in changed and name in built and built[name].shape == parameter.shape:
                parameter.copy_(built[name])


@contextlib.contextmanager
def values_of_start(start: StartState | None, model: nn.Module, user: UserModel) -> Iterator[None]:
    """Lets forward find what was kept at the start, such as an empty table of results, and gives back what
    is kept now."""
    if start is None or not start.has_other_values():
        yield
        return
    now = StartState(model, user, with_parameters=False)
    start.restore_values()
    try:
        yield
    finally:
        now.restore_values()


def undivided_modules(plan: Plan, model: nn.Module) -> list[str]:
    """Returns the paths of modules that are called for all samples of a step at once: blocks of sections that
    take these, what is in them, and what lines of forward that are such a block call alone."""
    whole = [block for section in plan.sections if section.whole_batch for block in section.blocks]
    others = [block for section in plan.sections if not section.whole_batch for block in section.blocks]
    found = {id(m) for block in whole for m in model.get_submodule(block).modules()}
    return [
        path
        for path, module in model.named_modules()
        if id(module) in found and (is_in_any(path, whole) or not is_in_any(path, others))
    ]


def is_in_any(path: str | None, blocks: Collection[str]) -> bool:
    """Whether the module at `path` is that of one of the blocks or in one."""
    return path is not None and any(f"{path}.".startswith(f"{block}.") for block in blocks)


def are_equal(a: Any, b: Any) -> bool:
    """Whether two values are the same; not-a-number is itself."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
            return a is b
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b or a != a)


def _iter_containers(
    model: nn.Module, user: UserModel, with_modules: bool
) -> Iterator[tuple[str | None, _Container]]:
    """Yields what may keep values, with the path of the module that has it (None for classes and files)."""
    seen = set[int]()
    for path, module in model.named_modules() if with_modules else ():
        yield from _nested(path, vars(module), seen)
        yield path, vars(module)["_buffers"]
        yield from ((path, vars(module)[name]) for name in _HOOKS)  # flags may stand for them
    for cls in user_classes(model):
        yield None, cls
        for content in _read(cls).values():
            yield from _nested(None, content, seen)
    for file in user_files(model, user):
        yield from _nested(None, file, seen)
    for function in user_functions(model, user):
        yield from _nested(None, vars(function), seen)
        cells = (cell for cell in function.__closure__ or () if is_filled(cell))
        kept = (function.__defaults__, function.__kwdefaults__, [cell.cell_contents for cell in cells])
        for content in kept:
            for inner in content.values() if isinstance(content, dict) else content or ():
                yield from _nested(None, inner, seen, MOST_DEPTH)


def _nested(
    owner: str | None, content: Any, seen: set[int], depth: int = MOST_DEPTH + 1
) -> Iterator[tuple[str | None, _Container]]:
    """Yields a container, or the attributes of an object, and what is in it."""
    if is_plain_object(content) and not isinstance(content, _CONTAINERS):
        content = vars(content)
    is_outer = depth > MOST_DEPTH  # attributes of a module, globals of a file
    if not isinstance(content, _CONTAINERS) or id(content) in seen or not depth:
        return
    if not is_outer and len(content) > MOST_ENTRIES:
        return
    seen.add(id(content))
    yield owner, content
    entries = _read(content)
    for inner in entries.values() if isinstance(entries, dict) else entries:
        yield from _nested(owner, inner, seen, depth - 1)


def _read(container: _Container) -> Any:
    """Returns a copy of a container; of one with names only the data in it."""
    if isinstance(container, (type, dict)):
        named = vars(container) if isinstance(container, type) else container
        return {name: value for name, value in named.items() if _is_data(name, value)}
    return type(container)(container) if type(container) in _CONTAINERS else list(container)


def _is_data(name: Any, value: Any) -> bool:
    """Whether an attribute, a global or an entry is data that user code may have put there."""
    if isinstance(name, str) and (name.startswith("__") or name in PLAIN_ATTRIBUTES):
        return False
    if name == _COLLECTING_FLAG or (isinstance(value, FunctionType) and value.__module__ == _COLLECTING_FILE):
        return False
    if isinstance(name, int):  # of a hook, too
        return True
    is_code = callable(value) or isinstance(value, (ModuleType, property, classmethod, staticmethod))
    return not is_code and not hasattr(type(value), "__set__")


def _write(container: Any, start: Any) -> None:
    """Gives a container the entries that it had."""
    if isinstance(container, (dict, type)):
        now = _read(container)
        for name in [n for n in now if n not in start]:
            delattr(container, name) if isinstance(container, type) else container.pop(name)
        for name, value in start.items():
            if name not in now or now[name] is not value:
                if isinstance(container, type):
                    setattr(container, name, value)
                elif _is_cast(now.get(name), value):
                    now[name].copy_(value)
                else:
                    container[name] = value
    else:
        container.clear()
        getattr(container, "update" if isinstance(container, set) else "extend")(start)


def _is_cast(now: Any, start: Any) -> bool:
    """Whether a tensor has been replaced by one of another dtype."""
    both = isinstance(now, torch.Tensor) and isinstance(start, torch.Tensor)
    return both and now.shape == start.shape and now.dtype != start.dtype


def _have_equal_entries(now: Any, start: Any) -> bool:
    """Whether two copies of a container have the same objects or equal numbers in them."""
    if len(now) != len(start):
        return False
    if isinstance(now, dict):
        return all(name in now and _is_same(now[name], value) for name, value in start.items())
    return now == start if isinstance(now, set) else all(map(_is_same, now, start))


def _is_same(a: Any, b: Any) -> bool:
    plain = (bool, int, float, str)
    return a is b or (type(a) is type(b) and isinstance(a, plain) and bool(a == b or a != a))


def _arrays(entries: Any) -> Iterator[Any]:
    """Yields tensors and arrays among the entries of a container."""
    for value in entries.values() if isinstance(entries, dict) else entries:
        if isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, nn.Parameter):
            yield value


def _clone(array: Any) -> Any:
    return array.detach().clone() if isinstance(array, torch.Tensor) else array.copy()


@torch.no_grad()
def _sum_parameters(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Returns for each parameter what changes if its values do."""
    dense = (
        (n, p)
        for n, p in model.named_parameters()
        if type(p.data) is torch.Tensor and p.numel() and not (p.is_meta or p.is_complex())
    )
    parameters = ((n, p.flatten()) for n, p in dense)
    return {n: (float(p.sum(dtype=torch.float64)), float(p[0]), float(p[-1])) for n, p in parameters}
