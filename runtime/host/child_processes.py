"""Settings of a process: start as a worker, keep freed memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys

import torch

from secc.runtime.host.parent_death import die_with_parent

# Finish the step, save and end; SIGUSR1 is Slurm's warning before a job ends.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_NAME = 15
_MALLOPT_VALUES = {
    -1: 1 << 30,  # M_TRIM_THRESHOLD: free bytes that may stay at the end of the heap
    -3: 1 << 25,  # M_MMAP_THRESHOLD: blocks of more bytes are mapped outside the heap
}


def prepare_worker_process(parent: int, name: str) -> None:
    """Sets up a process that helps a rank: it dies with the rank `parent`, leaves requests to stop to it
    (Slurm signals every process of a job), computes in one thread, and is called `name` in lists of
    processes.
    """
    die_with_parent(parent)
    name_this_process(name)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # the rank's thread pool does not survive a fork


def allow_child_processes() -> None:
    """Lets this process, which multiprocessing started as a daemon, start processes of its own, as loaders of
    streams do. They have to notice its end by themselves, as torch's DataLoader workers do."""
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]


def name_this_process(name: str) -> None:
    """Gives this process a name in `ps` and `top`, on Linux; 15 characters of it are shown."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


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
