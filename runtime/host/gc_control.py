"""Pausing Python's garbage collector where it cannot find anything, and slowing it down where it finds
little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SLOW_GC_THRESHOLD = 100_000  # between two looks for garbage


@contextmanager
def pause_gc() -> Iterator[None]:
    """For code that makes many small tuples and no cycles: looking for garbage among them would take as long
    as the code itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def slow_gc() -> Iterator[None]:
    """For work that keeps most of what it makes until it ends: what was there before is not looked at, and
    the rest seldom."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_SLOW_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
