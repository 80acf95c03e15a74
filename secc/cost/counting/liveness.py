"""What a block that owes no backward has in memory at once: the tensors that it makes and has not let go of
yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from secc.cost.counting.saved_tensors import storage_key


class LiveBytesTracker:
    """Counts storages from where they are made to where the last tensor of them goes. `bytes` has what was
    alive after each operation."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self.bytes_after_op: list[int] = []
        self._arguments = [*given]  # keeps addresses from being used again
        self._counted_storages = {storage_key(t) for t in self._arguments}
        self._live_bytes = 0
        self._watched: dict[int, weakref.ref[Any]] = {}

    def record_results(self, made: Iterable[torch.Tensor]) -> None:
        """Count what an operation returned, but for what it was given."""
        for tensor in made:
            key, held = storage_key(tensor), tensor.untyped_storage()
            if key not in self._counted_storages:
                self._counted_storages.add(key)
                self._live_bytes += held.nbytes()
                self._watched[key] = weakref.ref(held, self._on_release(key, held.nbytes()))
        self.bytes_after_op.append(self._live_bytes)

    def _on_release(self, key: int, size: int) -> Any:
        def gone(_: object) -> None:
            self._counted_storages.discard(key)
            self._live_bytes -= size
            del self._watched[key]

        return gone
