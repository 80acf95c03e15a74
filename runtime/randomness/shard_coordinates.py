"""Coordinates of the entries that this rank draws, if the ranks of a tensor-parallel replica hold shards of a
result.

Random numbers are made from an entry's coordinates in the whole result, so every rank draws the numbers that
a single rank with all of it would draw.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_thread_state = threading.local()
EntryRange = tuple[int, int]


@contextmanager
def drawing_shard(dim: int, ranges: Sequence[EntryRange]) -> Iterator[None]:
    """Let random ops inside draw the entries `ranges` along `dim` of a whole result."""
    _thread_state.part = dim, tuple(ranges)
    try:
        yield
    finally:
        _thread_state.part = None


def global_coordinates(shape: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return the coordinates, in the whole result, of the entries of a result of `shape`: int64 [shape[d]]
    for each dim d."""
    coordinates = [torch.arange(size, device=device) for size in shape]
    shard: tuple[int, tuple[EntryRange, ...]] | None = getattr(_thread_state, "part", None)
    if shard is not None:
        coordinates[shard[0]] = torch.cat([torch.arange(*ends, device=device) for ends in shard[1]])
    return coordinates
