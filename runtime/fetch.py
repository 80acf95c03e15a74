"""Several processes that load samples side by side, for datasets whose samples take long to decode.

They are forked together with the rank's loader, which asks them for the samples of its next share and takes them in any order. Each
holds few requests at a time, so that neither end of a pipe waits in a send while the other does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from secc.runtime.errors import UserError
from secc.runtime.processes import serve
from secc.runtime.user_model import UserModel

REMEDY = "the host may be out of memory; with --workers 0 samples load in the training process, which shows what happens"
AHEAD = 2  # samples that a process holds: one in work and one that waits


class ItemKey(NamedTuple):
    """Which sample: dataset index and epoch, which with the seed decide its random numbers."""

    epoch: int
    index: int


class Fetchers:
    """`count` forked processes that load samples of `user`'s dataset. Make it before threads, process groups and GPU contexts."""

    def __init__(self, user: UserModel, seed: int, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._busy: dict[Connection, int] = {}
        self._processes: dict[Connection, Any] = {}
        for _ in range(count):
            pipe, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(user, seed, far_end, os.getpid()), name="secc-fetcher", daemon=True)
            process.start()
            far_end.close()
            self._busy[pipe], self._processes[pipe] = 0, process
        self._waiting: dict[ItemKey, None] = {}  # in order, not sent yet
        self._sent: set[ItemKey] = set()
        self._items: dict[ItemKey, Any] = {}

    def request(self, keys: Iterable[ItemKey]) -> None:
        """Load `keys` ahead, in this order. Each is to be taken by one `result`."""
        self._waiting |= {key: None for key in keys if key not in self._sent and key not in self._items}
        self._send_ahead()

    def result(self, key: ItemKey) -> dict[str, Any]:
        """The sample, waited for. Raises UserError where it does not load."""
        self.request([key])
        while key not in self._items:
            self._receive()
        item = self._items.pop(key)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """End the processes."""
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
            process.join()

    def _send_ahead(self) -> None:
        while self._waiting:
            pipe = min(self._busy, key=lambda p: self._busy[p])
            if self._busy[pipe] >= AHEAD:
                return
            key = next(iter(self._waiting))
            del self._waiting[key]
            self._sent.add(key)
            self._busy[pipe] += 1
            pipe.send_bytes(pickle.dumps(key))

    def _receive(self) -> None:
        for pipe in wait(list(self._busy)):
            assert isinstance(pipe, Connection)
            try:
                key, item = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise UserError("a process that loads this rank's samples has ended", remedy=REMEDY) from None
            self._busy[pipe] -= 1
            self._sent.discard(key)
            self._items[key] = item
        self._send_ahead()


def _serve(user: UserModel, seed: int, pipe: Connection, parent: int) -> None:
    serve(parent)
    try:
        while True:
            key = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps((key, _attempt(user, key, seed))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the loader is gone


def _attempt(user: UserModel, key: ItemKey, seed: int) -> Any:
    try:
        return user.sample(key.index, seed, key.epoch)
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(f"loading samples failed\n{traceback.format_exc()}")
