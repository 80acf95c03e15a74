"""Loads samples in several processes, for datasets with samples that take long to decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from secc.runtime.host.fork_pool import WorkerPool
from secc.runtime.model.user_file import UserModel

REQUESTS_PER_PROCESS = 2  # one in work and one waiting


class SampleKey(NamedTuple):
    """A sample and the epoch that it is loaded for. With the seed they determine its random numbers."""

    epoch: int
    index: int


class SampleWorkers:
    """`count` forked processes that load samples of the user's dataset. Make it before threads, process
    groups and GPU contexts."""

    def __init__(self, user: UserModel, seed: int, count: int) -> None:
        self._pool = WorkerPool(
            lambda key: user.load_sample(key.index, seed, key.epoch),
            count,
            "secc-fetcher",
            REQUESTS_PER_PROCESS,
        )
        self._requested: set[SampleKey] = set()
        self._items: dict[SampleKey, Any] = {}

    def request_ahead(self, keys: Iterable[SampleKey]) -> None:
        """Start to load `keys`, in this order. Each must be taken by one `wait_for_result`."""
        for key in keys:
            if key not in self._requested and key not in self._items:
                self._requested.add(key)
                self._pool.submit_work(key, key)

    def wait_for_result(self, key: SampleKey) -> dict[str, Any]:
        """Wait for a sample and return it. Raises UserError if it does not load."""
        self.request_ahead([key])
        while key not in self._items:
            for finished, item in self._pool.collect_results():
                self._requested.discard(finished)
                self._items[finished] = item
        item = self._items.pop(key)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
