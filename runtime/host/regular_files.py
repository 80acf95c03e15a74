"""Reads files that other people send: only regular ones, because opening a named pipe waits, and a device may
never end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular_file(path: Path) -> BufferedReader:
    """Opens a regular file, or a link to one. Raises OSError, also for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises OSError, also for one of more than `max_bytes`."""
    with open_regular_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MiB", str(path))
    return content
