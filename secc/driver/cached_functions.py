"""The user's functions that keep their results (`functools.lru_cache`, `functools.cache`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from secc.runtime.model.kept_values import is_cached


@dataclass(frozen=True)
class CachedFunction:
    """A function with a cache, and where a file or a class holds it."""

    holder: dict[str, Any] | type
    name: str
    function: Any

    @property
    def at_present(self) -> CachedFunction:
        """What the same place holds now."""
        names = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        return CachedFunction(self.holder, self.name, names.get(self.name))

    @property
    def has_results(self) -> bool:
        """Whether the cache has any results."""
        return is_cached(self.function) and self.function.cache_info().currsize > 0

    @property
    def without_cache(self) -> Callable[..., Any]:
        """The function itself, which computes at every call."""
        return self.function.__wrapped__

    def replace_by(self, function: Callable[..., Any]) -> None:
        """Puts another function in its place."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = function
        else:
            setattr(self.holder, self.name, function)

    def restore_function(self, had_results: bool) -> None:
        """Puts this function in its place again; with an empty cache, unless it `had_results`."""
        if not self.has_results or had_results:
            self.replace_by(self.function)
        elif self.at_present.has_results:
            self.replace_by(functools.lru_cache(**self.function.cache_parameters())(self.without_cache))


def find_cached_functions(files: Iterable[dict[str, Any]]) -> list[CachedFunction]:
    """Returns the functions with a cache of files, which are given by their globals, and of their classes."""
    files = list(files)
    classes = (
        c for f in files for c in f.values() if isinstance(c, type) and c.__module__ == f.get("__name__")
    )
    holders = [*files, *dict.fromkeys(classes)]
    return [CachedFunction(h, n, f) for h in holders for n, f in _named_functions(h)]


def _named_functions(holder: dict[str, Any] | type) -> Iterator[tuple[str, Any]]:
    names = holder if isinstance(holder, dict) else vars(holder)
    yield from ((name, function) for name, function in names.items() if is_cached(function))
