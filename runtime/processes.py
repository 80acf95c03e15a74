"""What keeps processes together: a child that dies with its parent, so that nothing is left behind when a rank is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed when the process that started it ends, however it ends. Only Linux can do it.

    `parent` is that process's id, where it may have ended before this was called.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def serve(parent: int) -> None:
    """What a process that loads samples does first: it ends with the rank `parent`, leaves Ctrl-C to it, and computes in one thread."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the rank's thread pool does not survive a fork
