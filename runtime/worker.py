"""Where loading runs: in this process, or ahead of the step in one background process of the rank.

Both answer the same questions. The background process is forked before process groups, threads and GPU contexts exist; it works on
one request at a time, batches before records of the next step, and ends when its rank does. Answers travel as plain bytes through a pipe:
shared memory is small in containers.
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
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

from secc.runtime.errors import UserError
from secc.runtime.loader import Collated, Loader, Share
from secc.runtime.metadata import Record

Ask = Share | Collated
AHEAD = 3  # requests that the background process holds: the next step's share, a batch in work and one that waits
PR_SET_PDEATHSIG = 1


class Inline:
    """Loads in this process, when asked for the result."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def request(self, asks: Iterable[Ask]) -> None:
        """Nothing runs ahead here."""

    def result(self, ask: Ask) -> Any:
        """Rows of metadata for a Share, a batch for Collated. Raises UserError where a sample does not load."""
        return self._loader.records.pack(list(self._loader.share(ask))) if isinstance(ask, Share) else self._loader.collated(ask)

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
        self._planned: dict[Ask, None] = {}  # in order, not sent yet
        self._sent: set[Ask] = set()
        self._answers: dict[Ask, Any] = {}

    def request(self, asks: Iterable[Ask]) -> None:
        """Work on `asks` ahead, in this order, after what was asked for before."""
        self._planned |= {ask: None for ask in asks if ask not in self._sent and ask not in self._answers}
        self._send_ahead()

    def result(self, ask: Ask) -> Any:
        """As `Inline.result`, waited for. Each answer is given once; a new step's share ends the wait for older steps' batches."""
        if isinstance(ask, Share):
            self._planned = {a: None for a in self._planned if a.step >= ask.step}
            self._answers = {a: answer for a, answer in self._answers.items() if a.step >= ask.step}
        if ask not in self._sent and ask not in self._answers:
            self._send(ask)
        while ask not in self._answers:
            self._send_ahead()
            self._receive()
        answer = self._answers.pop(ask)
        self._send_ahead()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send_ahead(self) -> None:
        """Keep few requests under way: neither end of the pipe must ever wait in a send while the other does."""
        while self._planned and len(self._sent) + len(self._answers) < AHEAD:
            self._send(next(iter(self._planned)))

    def _send(self, ask: Ask) -> None:
        self._planned.pop(ask, None)
        self._sent.add(ask)
        try:
            self._pipe.send_bytes(pickle.dumps(ask))
        except OSError:
            raise self._ended() from None

    def _receive(self) -> None:
        try:
            ask, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        self._sent.discard(ask)
        self._answers[ask] = answer

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
                ask = pickle.loads(pipe.recv_bytes())
                if isinstance(ask, Share):
                    shares.append(_Work(loader, ask))
                else:
                    _send(pipe, ask, _attempt(lambda ask=ask: loader.collated(ask)))
            if shares[0].advance():
                work = shares.popleft()
                _send(pipe, work.ask, work.answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the rank is gone


class _Work:
    """A share in the making."""

    def __init__(self, loader: Loader, ask: Share) -> None:
        self.ask, self._pack, self._records = ask, loader.records.pack, loader.share(ask)
        self._done: list[Record] = []
        self.answer: torch.Tensor | Exception | None = None

    def advance(self) -> bool:
        """Make one record more; whether `answer` is there now."""
        record = _attempt(lambda: next(self._records, None))
        if isinstance(record, Record):
            self._done.append(record)
            return False
        self.answer = self._pack(self._done) if record is None else record
        return True


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
