"""Settings of a process: die together with its parent, start as a worker, keep freed memory. They leave no
process behind when a rank is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch

_PR_SET_PDEATHSIG = 1
_MALLOPT_VALUES = {
    -1: 1 << 30,  # M_TRIM_THRESHOLD: free bytes that may stay at the end of the heap
    -3: 1 << 25,  # M_MMAP_THRESHOLD: blocks of more bytes are mapped outside the heap
}


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent ends, however the parent ends (prctl
    PR_SET_PDEATHSIG).

    Does nothing on systems other than Linux. `parent` is the parent's process id; pass it where the parent
    may have ended before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def prepare_worker_process(parent: int) -> None:
    """Sets up a process that loads samples: it dies with the rank `parent`, leaves Ctrl-C to it and computes
    in one thread.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the rank's thread pool does not survive a fork


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory in this process instead of returning it to the system (glibc's
    mallopt).

    Each step frees its activations and gradients, and the next step allocates as much again. Memory that was
    returned comes back page by page, with thousands of page faults per step on CPUs. On a GPU torch's
    allocator caches memory by itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        for option, size in _MALLOPT_VALUES.items():
            mallopt(option, size)
