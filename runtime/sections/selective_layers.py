"""Selects the layers that `selective` recomputation runs again: every second one. Imports no torch, because
the compiler's passes use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby


def alternate_slice(count: int) -> slice:
    """Slice of every second of `count` layers that leaves out the last one."""
    return slice(count % 2, None, 2) if count > 1 else slice(0, 0)


def select_alternate_blocks(blocks: Iterable[str], classes: Mapping[str, str]) -> list[str]:
    """Return every second block of each run of blocks that have one class and one parent module. `classes`
    maps block paths to class names."""
    ordered = sorted(
        blocks, key=lambda path: [(int(part) if part.isdecimal() else -1, part) for part in path.split(".")]
    )
    selected: list[str] = []
    for _, run in groupby(ordered, key=lambda path: (path.rpartition(".")[0], classes[path])):
        members = list(run)
        selected += members[alternate_slice(len(members))]
    return selected
