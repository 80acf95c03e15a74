"""Coordinates of the entries that this rank draws, if the ranks of a replica hold parts of a result: shards
of tensor parallelism, rows of context parallelism, or both.

Random numbers are made from an entry's coordinates in the whole result, so every rank draws the numbers that
a single rank with all of it would draw.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

_thread_state = threading.local()
EntryRange = tuple[int, int]


@contextmanager
def drawing_shard(dim: int, ranges: Sequence[EntryRange]) -> Iterator[None]:
    """Let random ops inside draw the entries `ranges` along `dim` of a whole result."""
    with drawing_entries(dim, torch.cat([torch.arange(*ends) for ends in ranges])):
        yield


@contextmanager
def drawing_entries(dim: int, entries: torch.Tensor) -> Iterator[None]:
    """Let random ops inside draw the given entries (int64) along `dim` of a whole result."""
    outer: Mapping[int, torch.Tensor] = getattr(_thread_state, "entries", {})
    _thread_state.entries = {**outer, dim: entries}
    try:
        yield
    finally:
        _thread_state.entries = outer


def global_coordinates(shape: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return the coordinates, in the whole result, of the entries of a result of `shape`: int64 [shape[d]]
    for each dim d."""
    held: Mapping[int, torch.Tensor] = getattr(_thread_state, "entries", {})
    return [held[d].to(device) if d in held else torch.arange(n, device=device) for d, n in enumerate(shape)]


def holds_part(dim: int) -> bool:
    """Return whether random ops draw only some entries along `dim`."""
    return dim in getattr(_thread_state, "entries", {})
