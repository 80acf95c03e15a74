"""Folders for temporary files that only this user can enter. A killed process cannot remove its own, so the
next one that makes such a folder does."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _LOCK_FILE = "secc-run-", "lock"


@contextmanager
def hold_private_folder() -> Iterator[Path]:
    """Makes a folder and removes it in the end; the kernel holds its lock as long as this process lives.
    First removes those of this user's processes that are gone."""
    remove_abandoned_folders()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        file = Path(folder) / f".{_LOCK_FILE}"
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(file, file.with_name(_LOCK_FILE))  # where others look for it
            yield Path(folder)
        finally:
            os.close(lock)


def remove_abandoned_folders() -> None:
    """Removes the private folders of this user that no living process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            # A folder without the file is one that another process is just making.
            lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
