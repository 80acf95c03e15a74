"""Imports CP-SAT's Python interface without pandas.

It imports pandas to describe series of variables, which nothing here uses: that takes as long as all the rest
of a small allocation. Annotations are all that is read of pandas while it is imported, so they read `Any`;
what is called later reads the real pandas.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Annotations(ModuleType):
    """Takes the place of pandas while annotations of the solver read its names: each is `Any`."""

    def __getattr__(self, name: str) -> Any:
        return Any


class _DeferredModule(ModuleType):
    """Takes the place of pandas after that: imports it when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def deferred_pandas(importer: str) -> Iterator[None]:
    """While the module `importer` is imported here, its `pd` is not pandas; afterwards pandas is imported
    when the module uses it. Does nothing where pandas is there already."""
    if "pandas" in sys.modules or importer in sys.modules:
        yield
        return
    placeholder = _Annotations("pandas")
    sys.modules["pandas"] = placeholder
    try:
        yield
    finally:
        del sys.modules["pandas"]
    module = sys.modules[importer]
    if vars(module).get("pd") is placeholder:
        vars(module)["pd"] = _DeferredModule("pandas")
