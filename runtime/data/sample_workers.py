"""Several processes that load samples side by side, for datasets whose samples take long to decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from secc.runtime.host.fork_pool import Pool
from secc.runtime.model.user_file import UserModel

HELD = 2  # samples that a process has: one in work and one that waits


class ItemKey(NamedTuple):
    """Which sample: dataset index and epoch, which with the seed decide its random numbers."""

    epoch: int
    index: int


class Fetchers:
    """`count` forked processes that load samples of `user`'s dataset. Make it before threads, process groups
    and GPU contexts."""

    def __init__(self, user: UserModel, seed: int, count: int) -> None:
        self._pool = Pool(lambda key: user.sample(key.index, seed, key.epoch), count, "secc-fetcher", HELD)
        self._asked: set[ItemKey] = set()
        self._items: dict[ItemKey, Any] = {}

    def request(self, keys: Iterable[ItemKey]) -> None:
        """Load `keys` ahead, in this order. Each is to be taken by one `result`."""
        for key in keys:
            if key not in self._asked and key not in self._items:
                self._asked.add(key)
                self._pool.give(key, key)

    def result(self, key: ItemKey) -> dict[str, Any]:
        """The sample, waited for. Raises UserError where it does not load."""
        self.request([key])
        while key not in self._items:
            for done, item in self._pool.take():
                self._asked.discard(done)
                self._items[done] = item
        item = self._items.pop(key)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
