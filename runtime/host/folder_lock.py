"""Locks that keep two processes from writing into one folder at the same time. The kernel frees a lock when
the process that holds it ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from secc.runtime.errors import UserError

_WAIT_S = 3.0  # a holder that was killed a moment ago may still be ending
_MAX_HOLDER_BYTES = 100


@contextmanager
def hold_lock(path: Path, folder: Path, holder: str, remedy: str) -> Iterator[None]:
    """Holds the lock file `path`, which stands for `folder`; does nothing where there can be no such file, or
    no locks.

    Raises UserError, with the process that has the lock, if another one does. `holder` says what a process
    with the lock does, for that message: "a run writes into the directory".
    """
    descriptor = _open_locked(path, folder, holder, remedy)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the folder may be gone or read-only by now; the lock ends anyway
                path.unlink()
            os.close(descriptor)


def _open_locked(path: Path, folder: Path, holder: str, remedy: str) -> int | None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise UserError(f"{holder} ({other or 'another process'})", str(folder), remedy) from None
        except OSError:
            os.close(descriptor)
            return None
        if _is_file(descriptor, path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # the holder has removed the file between opening and locking it


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether `path` still is the opened file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
