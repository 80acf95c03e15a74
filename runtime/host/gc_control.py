"""Pauses Python's garbage collector where it cannot find anything, and slows it down where it finds
little.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SLOW_GC_THRESHOLD = 100_000  # net allocations between two collections


@contextmanager
def pause_gc(exempt: bool = False) -> Iterator[None]:
    """Disables the collector inside the `with` block.

    For code that makes many small tuples and no cycles, where collections would take as long as the code
    itself. exempt: if this is inside `slow_gc`, later collections skip every object that exists when the
    block ends (gc.freeze). That is for imports, since what they make is never freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if exempt and gc.get_threshold()[0] == _SLOW_GC_THRESHOLD:
            gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def slow_gc() -> Iterator[None]:
    """Makes collections rare inside the `with` block and exempts all objects that exist before it
    (gc.freeze). Inside another one it does nothing.

    For work that keeps most of what it allocates until it ends.
    """
    before = gc.get_threshold()
    if before[0] == _SLOW_GC_THRESHOLD:
        yield
        return
    gc.freeze()
    gc.set_threshold(_SLOW_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.freeze()  # young objects too, so that leaving the block starts no collection
        gc.set_threshold(*before)
        gc.unfreeze()
