"""Liveness of storages: how many bytes the tensors of running code hold at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """A key that identifies the storage of a tensor, whatever its shape or view, while the storage is
    alive."""
    # torch has no public name for it
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


class LiveBytesTracker:
    """Counts storages from allocation until the last tensor that uses them is freed.

    bytes_after_op: live bytes after each operation. `arguments` are not counted.
    """

    def __init__(self, arguments: Iterable[torch.Tensor]) -> None:
        self.bytes_after_op: list[int] = []
        self._arguments = [*arguments]  # addresses of freed storages would be reused
        self._counted_storages = {storage_key(t) for t in self._arguments}
        self._live_bytes = 0
        self._watched: dict[int, weakref.ref[Any]] = {}

    def record_results(self, results: Iterable[torch.Tensor]) -> None:
        """Count the storages of an operation's results (of any shape), unless they are arguments or
        counted already."""
        for tensor in results:
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key not in self._counted_storages:
                self._counted_storages.add(key)
                self._live_bytes += storage.nbytes()
                self._watched[key] = weakref.ref(storage, self._on_release(key, storage.nbytes()))
        self.bytes_after_op.append(self._live_bytes)

    def _on_release(self, key: int, size: int) -> Any:
        def on_release(_: object) -> None:
            self._counted_storages.discard(key)
            self._live_bytes -= size
            del self._watched[key]

        return on_release
