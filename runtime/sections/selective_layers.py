"""Every second layer: what `selective` recomputation takes. Without torch, because the compiler's passes ask,
too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby


def alternate_slice(count: int) -> slice:
    """Every second of `count` layers, counted so that the last one is not among them."""
    return slice(count % 2, None, 2) if count > 1 else slice(0, 0)


def select_alternate_blocks(blocks: Iterable[str], classes: Mapping[str, str]) -> list[str]:
    """Every second of each run of several blocks of one class inside one module. `classes` names each block's
    class."""
    ordered = sorted(
        blocks, key=lambda path: [(int(part) if part.isdecimal() else -1, part) for part in path.split(".")]
    )
    found: list[str] = []
    for _, run in groupby(ordered, key=lambda path: (path.rpartition(".")[0], classes[path])):
        alike = list(run)
        found += alike[alternate_slice(len(alike))]
    return found
