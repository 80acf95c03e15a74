"""The key-value store in which ranks on several machines meet. The launcher of node 0 keeps it, and whoever
connects is asked for the run's secret; torch's own TCPStore asks for none.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from secc.runtime.host.signed_channel import SignedChannel, connect_to_peer, read_secret

ENDPOINT_VARIABLE = "SECC_ENDPOINT"  # HOST:PORT of node 0's launcher
SECRET_VARIABLE = "SECC_SECRET"  # path of the file with the secret
RUN_VARIABLE = "SECC_RUN"  # random text of node 0's launcher: ranks left over from another cannot join
_Store: Any = dist.Store  # pyright: ignore[reportPrivateImportUsage]
_OPEN_STORES: list[NodeStore] = []  # torch keeps their C++ part only


class KeyValueTable:
    """The values of the store, for the threads that serve ranks."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Forgets all values, before another attempt."""
        with self._changed:
            self._values.clear()

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Does what a rank asks for and returns the reply; None after a wait that was too long."""
        keys: list[str] = request["keys"]
        with self._changed:
            match request["kind"]:
                case "set":
                    self._values[keys[0]] = request["value"]
                case "add":
                    total = int(_decode(self._values.get(keys[0], _encode(b"0")))) + request["value"]
                    self._values[keys[0]] = _encode(str(total).encode())
                    self._changed.notify_all()
                    return total
                case "check":
                    return all(key in self._values for key in keys)
                case "delete":
                    return self._values.pop(keys[0], None) is not None
                case "count":
                    return sum(key.startswith(keys[0]) for key in self._values)
                case _:  # "get" and "wait"
                    if not self._changed.wait_for(
                        lambda: all(key in self._values for key in keys), request["seconds"]
                    ):
                        return None
                    return self._values[keys[0]] if request["kind"] == "get" else True
            self._changed.notify_all()
            return True


class NodeStore(_Store):
    """A rank's end of the store; `prefix` starts all keys. Each thread has a connection of its own, because
    a `get` occupies one until the key is there."""

    def __init__(self, address: tuple[str, int], secret: bytes, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._address, self._secret, self._prefix, self._timeout = address, secret, prefix, timeout
        self._own = threading.local()
        _OPEN_STORES.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value=_encode(value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        return _decode(self._wait_for("get", [key], self._timeout))

    def add(self, key: str, value: int) -> int:
        return self._ask("add", [key], value=value)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", keys, timeout or self._timeout)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", [key])

    def num_keys(self) -> int:
        return self._ask("count", [""])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> NodeStore:
        return NodeStore(self._address, self._secret, self._prefix, self._timeout)

    def _wait_for(self, kind: str, keys: list[str], timeout: timedelta) -> Any:
        found = self._ask(kind, keys, seconds=timeout.total_seconds())
        if found is None:
            raise dist.DistStoreError(f"wait timeout after {timeout.total_seconds():.0f} s, keys: {keys}")
        return found

    def _ask(self, kind: str, keys: list[str], **more: Any) -> Any:
        """Returns the reply to a request. Raises DistNetworkError, a RuntimeError, if the launcher of node 0
        is gone."""
        try:
            channel: SignedChannel | None = getattr(self._own, "channel", None)
            if channel is None:
                channel = self._own.channel = connect_to_peer(self._address, self._secret)
                channel.send({"role": "rank"})
            channel.send({"kind": kind, "keys": [self._prefix + key for key in keys], **more})
            return channel.receive(None)
        except OSError as error:
            raise dist.DistNetworkError(f"the launcher of node 0 does not answer: {error}") from None


def open_node_store(attempt: int, timeout: timedelta) -> NodeStore:
    """Joins the store that the environment names."""
    address = parse_endpoint(os.environ[ENDPOINT_VARIABLE])
    prefix = f"{os.environ[RUN_VARIABLE]}/{attempt}/"
    return NodeStore(address, read_secret(Path(os.environ[SECRET_VARIABLE])), prefix, timeout)


def serve_rank(channel: SignedChannel, table: KeyValueTable) -> None:
    """Answers the requests of one connection until it ends."""
    while True:
        channel.send(table.answer(channel.receive(None)))


def parse_endpoint(text: str) -> tuple[str, int]:
    """Returns the host and port of HOST:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("expected HOST:PORT")
    return host.strip("[]"), int(port)


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(value: str) -> bytes:
    return base64.b64decode(value)
