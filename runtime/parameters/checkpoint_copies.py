"""Copies of a run's newest checkpoint in the launcher's memory (`--replicate`), for ranks that start again:
they then read nothing from storage.

Whoever writes a file of a checkpoint puts its bytes into sealed memory (memfd_create(2)) and passes the
descriptor to the launcher, which outlives the ranks and keeps it. Ranks that start again are passed the
descriptors, link them into a folder of their own, and check that folder against the manifest as they check
one on storage.

The launcher listens on a Unix socket in its private folder, which only its user can enter.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secc.runtime.host.memory import available_memory

COPIES_VARIABLE = "SECC_COPIES"  # path of the launcher's socket
_REQUEST_BYTES = 1 << 16
_TIMEOUT_S = 60.0
_MEMORY_SHARE = 0.5  # of the host's available memory that one file may take
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass
class _CopiedCheckpoint:
    """Descriptors of the files of a checkpoint by name; `is_complete` once it has been published."""

    files: dict[str, int] = field(default_factory=dict[str, int])
    is_complete: bool = False


class CopyKeeper:
    """Keeps the copies in this process, the launcher, and hands them out from a thread. A context manager
    that frees them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[tuple[str, int], _CopiedCheckpoint] = {}  # by folder and step
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="secc-copies", daemon=True)

    def __enter__(self) -> CopyKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for checkpoint in self._kept.values():
            _close_all(checkpoint.files.values())

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was shut down
            with connection, suppress(OSError, ValueError, KeyError):
                connection.settimeout(_TIMEOUT_S)
                content, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
                reply, found = self._answer(json.loads(content), descriptors)
                socket.send_fds(connection, [json.dumps(reply).encode()], found)

    def _answer(self, request: dict[str, Any], descriptors: list[int]) -> tuple[Any, list[int]]:
        folder, step = str(request["folder"]), int(request["step"])
        match request["kind"]:
            case "put":
                checkpoint = self._kept.setdefault((folder, step), _CopiedCheckpoint())
                if checkpoint.is_complete:  # the step is saved again
                    _close_all(checkpoint.files.values())
                    checkpoint = self._kept[folder, step] = _CopiedCheckpoint()
                _close_all([checkpoint.files.pop(request["name"], -1)])
                checkpoint.files[request["name"]] = descriptors[0]
                return True, []
            case "complete":
                for key in [k for k in self._kept if k[0] == folder and k[1] != step]:
                    _close_all(self._kept.pop(key).files.values())
                self._kept.setdefault((folder, step), _CopiedCheckpoint()).is_complete = True
                return True, []
            case "list":
                complete = [k[1] for k, c in self._kept.items() if k[0] == folder and c.is_complete]
                if not complete:
                    return None, []
                return {"step": complete[-1], "names": list(self._kept[folder, complete[-1]].files)}, []
            case _:
                files = self._kept.get((folder, step), _CopiedCheckpoint()).files
                found = files.get(request["name"])
                return found is not None, [] if found is None else [found]


def put_copy(folder: Path, step: int, file: Path) -> None:
    """Copies a file of the checkpoint of a step in `folder` into the launcher's memory. Raises OSError."""
    size = file.stat().st_size
    if size > available_memory() * _MEMORY_SHARE:
        raise OSError(f"the host has too little memory for {size} bytes")
    memory = os.memfd_create("secc-copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with file.open("rb") as source:
            while os.sendfile(memory, source.fileno(), None, 1 << 30):  # pyright: ignore
                pass
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        _ask("put", folder, step, file.name, [memory])
    finally:
        os.close(memory)


def complete_copies(folder: Path, step: int) -> None:
    """Lets the launcher forget all other checkpoints of the folder than this one, which is whole. Raises
    OSError."""
    _ask("complete", folder, step)


def link_copies(folder: Path) -> Path | None:
    """Makes a folder with the name of the checkpoint in `folder` that the launcher has copies of, and links
    its files: to copies, or to the folder of the checkpoint for files without. Returns its path; None if
    there are no copies. The files are open as long as this process lives."""
    if COPIES_VARIABLE not in os.environ:
        return None
    with suppress(OSError):
        listed, _ = _ask("list", folder, 0)
        if listed is None:
            return None
        checkpoint = folder / f"step_{listed['step']:08d}"
        place = Path(tempfile.mkdtemp(prefix="copies-", dir=Path(os.environ[COPIES_VARIABLE]).parent))
        linked = place / checkpoint.name
        linked.mkdir()
        if checkpoint.is_dir():
            for path in checkpoint.iterdir():
                if path.name not in listed["names"]:
                    (linked / path.name).symlink_to(path)
        for name in listed["names"]:
            found, descriptors = _ask("get", folder, listed["step"], name)
            if found:
                (linked / name).symlink_to(f"/proc/self/fd/{descriptors[0]}")
        return linked
    return None


def _ask(
    kind: str, folder: Path, step: int, name: str = "", descriptors: Sequence[int] = ()
) -> tuple[Any, list[int]]:
    """Returns the launcher's reply and descriptors. Raises OSError if it does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(os.environ[COPIES_VARIABLE])
        request = {"kind": kind, "folder": str(folder.resolve()), "step": step, "name": name}
        socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        content, found, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
        if not content:
            raise OSError("the launcher does not keep the copy")
        return json.loads(content), list(found)


def _close_all(descriptors: Any) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
