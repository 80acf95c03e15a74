"""Copies of a run's newest checkpoint in the memory of launchers (`--replicate`), for ranks that start again:
they then read nothing from storage.

Whoever writes a file of a checkpoint puts its bytes into sealed memory (memfd_create(2)) and passes the
descriptor to the launcher of its node, which outlives the ranks and keeps it. On several nodes the launcher
passes a copy on to that of the next node, so a machine can be lost with all that it holds. Ranks that start
again agree on a checkpoint, are passed the descriptors of its files, which their launcher gets from the
others where it has none, link them into a folder of their own, and check that folder against the manifest as
they check one on storage.

A launcher listens on a Unix socket in its private folder, which only its user can enter, and on several nodes
at the node's address, where it asks for the run's secret (`secc.runtime.host.signed_channel`).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secc.runtime.host.memory import available_memory
from secc.runtime.host.signed_channel import SignedChannel, SignedListener, connect_to_peer

COPIES_VARIABLE = "SECC_COPIES"  # path of the launcher's socket
_REQUEST_BYTES = 1 << 16
_TIMEOUT_S = 60.0  # without any progress
_LEAST_RATE = 10e6  # bytes a second that a file is passed on with, else it takes too long
_MESSAGE_BYTES = 1 << 22
_MEMORY_SHARE = 0.5  # of the host's available memory that one file may take
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Address = tuple[str, int]


@dataclass(frozen=True)
class CopyName:
    """Which checkpoint copies are of: `save` is another one for each attempt of a run, because a step may be
    saved in several of them."""

    save: str
    step: int


@dataclass
class _CopiedCheckpoint:
    """Descriptors of the files of a checkpoint by name. `number`: 0 until it was published, then larger than
    that of all published before."""

    files: dict[str, int] = field(default_factory=dict[str, int])
    number: int = 0


class CopyKeeper:
    """Keeps the copies in this process, the launcher, and hands them out from threads. A context manager
    that frees them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[CopyName, _CopiedCheckpoint] = {}
        self._lock, self._fetch_lock = threading.Lock(), threading.Lock()
        self._peers: tuple[Address, ...] = ()  # of the nodes after this one
        self._secret = b""
        self._nodes: SignedListener | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, name="secc-copies", daemon=True)

    def __enter__(self) -> CopyKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        if self._nodes is not None:
            self._nodes.close()
        with self._lock:
            for checkpoint in self._kept.values():
                _close_all(checkpoint.files.values())
            self._kept.clear()

    def listen(self, host: str, secret: bytes) -> Address:
        """Serves launchers of other nodes at an address of this one; returns the address. Raises OSError."""
        if self._nodes is None or self._nodes.address[0] != host:
            if self._nodes is not None:
                self._nodes.close()
            self._secret = secret
            self._nodes = SignedListener((host, 0), secret, self._serve_node)
            self._nodes.start()
        return self._nodes.address

    def set_peers(self, node: int, addresses: Mapping[int, Address]) -> None:
        """Notes where the launchers of an attempt's nodes listen, this one's `node` among them or not."""
        others = sorted((n for n in addresses if n != node), key=lambda n: (n < node, n))
        self._peers = tuple(addresses[n] for n in others)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was shut down
            threading.Thread(target=self._serve_rank, args=(connection,), daemon=True).start()

    def _serve_rank(self, connection: socket.socket) -> None:
        """Answers the request of a process of this node."""
        with connection, suppress(OSError, ValueError, KeyError):
            connection.settimeout(_TIMEOUT_S)
            content, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
            try:
                request = json.loads(content)
                name, file, reply = _copy_name(request), request["file"], None
                match request["kind"]:
                    case "put":
                        self._keep(name, file, os.dup(descriptors[0]))
                        reply = self._pass_on(name, file, descriptors[0])
                        _close_all([descriptors.pop()])
                    case "complete":
                        self._complete_everywhere(name)
                    case "list":
                        reply = self._list_everywhere()
                    case _:
                        descriptors += self._find(name, file)
                socket.send_fds(connection, [json.dumps(reply).encode()], descriptors)
            finally:
                _close_all(descriptors)

    def _serve_node(self, channel: SignedChannel) -> None:
        """Answers the request of another launcher."""
        request = channel.receive(_TIMEOUT_S)
        name = _copy_name(request)
        match request["kind"]:
            case "put":
                try:
                    _check_memory(request["size"])
                except OSError as error:
                    channel.send(str(error))
                    return
                channel.send("")
                self._keep(name, request["file"], _receive_file(channel, request["size"]))
                channel.send(None)
            case "complete":
                channel.send(self._complete(name, request["number"]))
            case "list":
                channel.send(self._list())
            case _:
                found = self._duplicate(name, request["file"])
                try:
                    size = os.fstat(found[0]).st_size if found else None
                    channel.send(size)
                    if size:
                        _send_parts(channel, found[0], size)
                finally:
                    _close_all(found)

    def _keep(self, name: CopyName, file: str, descriptor: int) -> None:
        with self._lock:
            if name not in self._kept:  # one is written at a time: others have failed
                for other in [n for n, c in self._kept.items() if not c.number]:
                    _close_all(self._kept.pop(other).files.values())
            files = self._kept.setdefault(name, _CopiedCheckpoint()).files
            _close_all([files.pop(file, -1)])
            files[file] = descriptor

    def _complete(self, name: CopyName, number: int | None) -> int:
        """Forgets all other checkpoints than this one, which was published as the newest. Returns its
        number."""
        with self._lock:
            largest = max((c.number for c in self._kept.values()), default=0)
            for other in [n for n in self._kept if n != name]:
                _close_all(self._kept.pop(other).files.values())
            checkpoint = self._kept.setdefault(name, _CopiedCheckpoint())
            checkpoint.number = largest + 1 if number is None else number
            return checkpoint.number

    def _complete_everywhere(self, name: CopyName) -> None:
        number = self._complete(name, None)
        for peer in self._peers:
            with (
                suppress(OSError, ValueError),
                _ask_node(peer, self._secret, "complete", name, number=number) as channel,
            ):
                channel.receive(_TIMEOUT_S)

    def _list(self) -> list[list[Any]]:
        """Returns [number, save, step, files] of each whole checkpoint that it keeps files of."""
        with self._lock:
            return [[c.number, n.save, n.step, list(c.files)] for n, c in self._kept.items() if c.number]

    def _list_everywhere(self) -> dict[str, Any] | None:
        """Returns the newest whole checkpoint on all nodes, and its files that any of them keeps."""
        found = self._list()
        for peer in self._peers:
            with suppress(OSError, ValueError), _ask_node(peer, self._secret, "list") as channel:
                found += channel.receive(_TIMEOUT_S)
        if not found:
            return None
        number, save, step, _ = max(found, key=lambda entry: entry[0])
        same = (entry for entry in found if entry[:3] == [number, save, step])
        files = sorted({file for entry in same for file in entry[3]})
        with self._lock:  # of a launcher that has joined again: later checkpoints are newer
            self._kept.setdefault(CopyName(save, step), _CopiedCheckpoint()).number = number
        return {"save": save, "step": step, "files": files}

    def _duplicate(self, name: CopyName, file: str) -> list[int]:
        """Returns a descriptor, to be closed, of a file that this launcher keeps; empty if it does not."""
        with self._lock:  # another thread may close the kept one
            kept = self._kept.get(name, _CopiedCheckpoint()).files.get(file)
            return [] if kept is None else [os.dup(kept)]

    def _find(self, name: CopyName, file: str) -> list[int]:
        """Returns a descriptor, to be closed, of a file, after getting it from another node if this one does
        not keep it; empty if none has it."""
        with self._fetch_lock:  # so that each file is passed on once
            found = self._duplicate(name, file)
            for peer in () if found else self._peers:
                with (
                    suppress(OSError, ValueError),
                    _ask_node(peer, self._secret, "get", name, file) as channel,
                ):
                    size = channel.receive(_TIMEOUT_S)
                    if size is not None:
                        _check_memory(size)
                        self._keep(name, file, _receive_file(channel, size))
                        return self._duplicate(name, file)
            return found

    def _pass_on(self, name: CopyName, file: str, descriptor: int) -> str:
        """Puts a copy of a file into the memory of the next node. Returns why that failed, "" if it did
        not."""
        if not self._peers:
            return ""
        where = "{}:{}".format(*self._peers[0])
        size = os.fstat(descriptor).st_size
        try:
            with _ask_node(self._peers[0], self._secret, "put", name, file, size=size) as channel:
                refusal = channel.receive(_TIMEOUT_S)
                if not refusal:
                    _send_parts(channel, descriptor, size)
                    channel.receive(_TIMEOUT_S)  # it keeps the copy
                return f"the launcher at {where}: {refusal}" if refusal else ""
        except (OSError, ValueError) as error:
            return f"the launcher at {where} does not take it: {error}"


def put_copy(name: CopyName, file: Path) -> str:
    """Copies a file of a checkpoint into the launcher's memory, and into that of the next node's; returns why
    that one has none, "" if it has. Raises OSError if this node's launcher has no copy."""
    size = file.stat().st_size
    _check_memory(size)
    with file.open("rb") as source, _sealed_memory() as memory:
        while os.sendfile(memory, source.fileno(), None, 1 << 30):  # pyright: ignore
            pass
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        problem, _ = _ask("put", name, file.name, [memory], _TIMEOUT_S + size / _LEAST_RATE)
    return problem


def complete_copies(name: CopyName) -> None:
    """Lets all launchers forget all other checkpoints than this one, which is whole. Raises OSError."""
    _ask("complete", name)


def link_copies(folder: Path, store: Any = None, rank: int = 0, world_size: int = 1) -> Path | None:
    """Makes a folder with the name of the checkpoint in `folder` that launchers have copies of, and links its
    files: to copies, or to the folder of the checkpoint for files without. Returns its path; None on all
    ranks if there are no copies, or a rank does not get them. The files are open as long as this process
    lives. Collective through `store`, in which the ranks meet, if there are several.
    """
    if COPIES_VARIABLE not in os.environ:
        return None
    listed = None
    if rank == 0:
        with suppress(OSError):
            listed, _ = _ask("list", CopyName("", 0))
    if store is not None:
        if rank == 0:
            store.set("secc/copies", json.dumps(listed))
        listed = json.loads(store.get("secc/copies"))
    if listed is None:
        return None
    linked = None
    with suppress(OSError):
        linked = _link_files(folder, CopyName(listed["save"], listed["step"]), listed["files"])
    if store is not None:
        store.set(f"secc/copies/{rank}", json.dumps(linked is not None))
        if not all(json.loads(store.get(f"secc/copies/{other}")) for other in range(world_size)):
            return None
    return linked


def _link_files(folder: Path, name: CopyName, files: Iterable[str]) -> Path:
    """Raises OSError if a file is not to be had."""
    checkpoint = folder / f"step_{name.step:08d}"
    place = Path(tempfile.mkdtemp(prefix="copies-", dir=Path(os.environ[COPIES_VARIABLE]).parent))
    linked = place / checkpoint.name
    linked.mkdir()
    kept = {file for file in files if Path(file).name == file}
    for file in kept:
        _, descriptors = _ask("get", name, file, timeout=None)
        if not descriptors:
            raise OSError(f"no launcher has {file}")
        (linked / file).symlink_to(f"/proc/self/fd/{descriptors[0]}")
    if checkpoint.is_dir():
        for path in checkpoint.iterdir():
            if path.name not in kept:
                (linked / path.name).symlink_to(path)
    return linked


def _ask(
    kind: str,
    name: CopyName,
    file: str = "",
    descriptors: Sequence[int] = (),
    timeout: float | None = _TIMEOUT_S,
) -> tuple[Any, list[int]]:
    """Returns this node's launcher's reply and descriptors. Raises OSError if it does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout)
        connection.connect(os.environ[COPIES_VARIABLE])
        request = {"kind": kind, "save": name.save, "step": name.step, "file": file}
        socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        content, found, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
        if not content:
            raise OSError("the launcher does not keep the copy")
        return json.loads(content), list(found)


@contextmanager
def _ask_node(
    peer: Address, secret: bytes, kind: str, name: CopyName | None = None, file: str = "", **more: Any
) -> Iterator[SignedChannel]:
    """Sends a request to another node's launcher; the channel has its reply. Raises OSError."""
    channel = connect_to_peer(peer, secret)
    try:
        name = name or CopyName("", 0)
        channel.send({"kind": kind, "save": name.save, "step": name.step, "file": file, **more})
        yield channel
    finally:
        channel.close()


def _copy_name(request: Mapping[str, Any]) -> CopyName:
    return CopyName(str(request["save"]), int(request["step"]))


def _send_parts(channel: SignedChannel, descriptor: int, size: int) -> None:
    for offset in range(0, size, _MESSAGE_BYTES):
        channel.send_bytes(os.pread(descriptor, _MESSAGE_BYTES, offset))


def _receive_file(channel: SignedChannel, size: int) -> int:
    """Returns a descriptor of sealed memory with the file. Raises OSError."""
    with _sealed_memory() as memory:
        received = 0
        while received < size:
            received += os.write(memory, channel.receive_bytes(_TIMEOUT_S))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        return os.dup(memory)


@contextmanager
def _sealed_memory() -> Iterator[int]:
    """A descriptor of memory that can be sealed, closed at the end."""
    memory = os.memfd_create("secc-copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield memory
    finally:
        os.close(memory)


def _check_memory(size: int) -> None:
    """Raises OSError if the host's memory does not hold `size` bytes more."""
    if size > available_memory() * _MEMORY_SHARE:
        raise OSError(f"the host has too little memory for {size} bytes")


def _close_all(descriptors: Any) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
