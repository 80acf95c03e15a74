"""Where loading runs: in this process, or ahead of the step in one background process of the rank.

Both answer the same questions. The background process is forked before process groups, threads and GPU contexts exist; it works on
one request at a time, batches before records of the next step, and ends when its rank does. Answers travel as plain bytes through a pipe:
shared memory is small in containers, and the pipe bounds how far the process runs ahead.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from secc.runtime.errors import UserError
from secc.runtime.loader import Collated, Loader, Share
from secc.runtime.metadata import Record

Ask = Share | Collated
PR_SET_PDEATHSIG = 1


class Inline:
    """Loads in this process, when asked for the result."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def request(self, asks: list[Ask]) -> None:
        """Nothing runs ahead here."""

    def result(self, ask: Ask) -> Any:
        """A list of records for a Share, a batch for Collated. Raises UserError where a sample does not load."""
        return list(self._loader.share(ask)) if isinstance(ask, Share) else self._loader.collated(ask)

    def close(self) -> None:
        """Nothing to end."""


class Background:
    """Loads in a process of its own. Make it before process groups, threads and GPU contexts: it forks."""

    def __init__(self, loader: Loader) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(loader, far_end, self._pipe, os.getpid()), name="secc-loader", daemon=True)
        self._process.start()
        far_end.close()
        self._asked: set[Ask] = set()
        self._answers: dict[Ask, Any] = {}

    def request(self, asks: list[Ask]) -> None:
        """Start to work on `asks`, in this order, after what was asked for before."""
        new = [ask for ask in dict.fromkeys(asks) if ask not in self._asked]
        self._asked.update(new)
        if new:
            try:
                self._pipe.send_bytes(pickle.dumps(new))
            except OSError:
                raise self._ended() from None

    def result(self, ask: Ask) -> Any:
        """As `Inline.result`, waited for. Each answer is given once."""
        self.request([ask])
        while ask not in self._answers:
            try:
                answered, answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._ended() from None
            self._answers[answered] = answer
        self._asked.remove(ask)
        answer = self._answers.pop(ask)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _ended(self) -> UserError:
        self._process.join(timeout=5)
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        remedy = "the host may be out of memory; with --workers 0 samples load in the training process, which shows what happens"
        return UserError(f"the process that loads this rank's samples {how}", remedy=remedy)


def _serve(loader: Loader, pipe: Connection, other_end: Connection, parent: int) -> None:
    """The background process: read requests, answer batches at once, and work on shares sample by sample in between."""
    other_end.close()
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the rank's thread pool does not survive a fork
    shares: deque[_Work] = deque()
    try:
        while True:
            while pipe.poll(0 if shares else None):
                for ask in pickle.loads(pipe.recv_bytes()):
                    if isinstance(ask, Share):
                        shares.append(_Work(ask, loader.share(ask)))
                    else:
                        _send(pipe, ask, _attempt(lambda ask=ask: loader.collated(ask)))
            if shares[0].advance():
                work = shares.popleft()
                _send(pipe, work.ask, work.answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the rank is gone


class _Work:
    """Records in the making."""

    def __init__(self, ask: Share, records: Iterator[Record]) -> None:
        self.ask, self._records = ask, records
        self.answer: list[Record] | Exception = []

    def advance(self) -> bool:
        """Make one record more; whether this was the end."""
        found = _attempt(lambda: next(self._records, None))
        if isinstance(found, Exception):
            self.answer = found
        elif found is not None and isinstance(self.answer, list):
            self.answer.append(found)
        return not isinstance(found, Record)


def _attempt(work: Callable[[], Any]) -> Any:
    """The result, or the exception to raise in the rank: a UserError as it is, a defect with its traceback."""
    try:
        return work()
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(f"loading samples failed\n{traceback.format_exc()}")


def _send(pipe: Connection, ask: Ask, answer: Any) -> None:
    pipe.send_bytes(pickle.dumps((ask, answer)))


def _die_with(parent: int) -> None:
    """End this process when the rank ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
