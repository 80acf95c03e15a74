"""Which part of a result this rank draws, where the ranks of a tensor-parallel replica have parts of it.

Random numbers are made of an entry's coordinates, and those are the whole result's: every rank draws the
numbers that one rank with all of it would.
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
    """Random ops inside draw the entries `ranges` along `dim` of a whole result."""
    _thread_state.part = dim, tuple(ranges)
    try:
        yield
    finally:
        _thread_state.part = None


def global_coordinates(shape: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Each entry's coordinate along each dim of a result of `shape`, counted in the whole result."""
    found = [torch.arange(size, device=device) for size in shape]
    part: tuple[int, tuple[EntryRange, ...]] | None = getattr(_thread_state, "part", None)
    if part is not None:
        found[part[0]] = torch.cat([torch.arange(*ends, device=device) for ends in part[1]])
    return found
