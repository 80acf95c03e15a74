"""Ends a process together with its parent. Imports nothing heavy: a rank asks for it in its first
milliseconds, before torch, which takes seconds to import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER_VARIABLE = "SECC_LAUNCHER"  # process id of the launcher that started this rank
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent ends, however the parent ends (prctl
    PR_SET_PDEATHSIG).

    Does nothing on systems other than Linux. `parent` is the parent's process id; pass it where the parent
    may have ended before this call: this process ends at once then.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher() -> None:
    """Ends this rank together with the process that started it. secc's launcher says which one that is;
    under torchrun it is the parent at this moment."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    die_with_parent(int(launcher) if launcher else None)
