"""What keeps processes together: a child that dies with its parent, so that nothing is left behind when a
rank is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch

_PR_SET_PDEATHSIG = 1
_MALLOPT_VALUES = {
    -1: 1 << 30,
    -3: 1 << 25,
}  # M_TRIM_THRESHOLD: free bytes at the end of the heap; M_MMAP_THRESHOLD: larger ones live outside it


def die_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed when the process that started it ends, however it ends. Only Linux
    can do it.

    `parent` is that process's id, where it may have ended before this was called.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def prepare_worker_process(parent: int) -> None:
    """What a process that loads samples does first: it ends with the rank `parent`, leaves Ctrl-C to it, and
    computes in one thread."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the rank's thread pool does not survive a fork


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees, as far as the C library lets it be told.

    A step frees its activations and gradients, and the next one wants as much again. What went back to the
    system in between comes page by page, each with a fault: thousands in a step on CPUs. On a GPU torch's
    allocator keeps memory by itself.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if tell is not None:
        for option, size in _MALLOPT_VALUES.items():
            tell(option, size)
