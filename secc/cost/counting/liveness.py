"""What a block that owes no backward has in memory at once: the tensors that it makes and has not let go of
yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from secc.cost.counting.saved_tensors import storage


class Live:
    """Counts storages from where they are made to where the last tensor of them goes. `bytes` has what was
    alive after each operation."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self.bytes: list[int] = []
        self._given = [*given]  # keeps addresses from being used again
        self._known = {storage(t) for t in self._given}
        self._alive = 0
        self._watched: dict[int, weakref.ref[Any]] = {}

    def add(self, made: Iterable[torch.Tensor]) -> None:
        """Count what an operation returned, but for what it was given."""
        for tensor in made:
            key, held = storage(tensor), tensor.untyped_storage()
            if key not in self._known:
                self._known.add(key)
                self._alive += held.nbytes()
                self._watched[key] = weakref.ref(held, self._gone(key, held.nbytes()))
        self.bytes.append(self._alive)

    def _gone(self, key: int, size: int) -> Any:
        def gone(_: object) -> None:
            self._known.discard(key)
            self._alive -= size
            del self._watched[key]

        return gone
