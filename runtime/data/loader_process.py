"""Where loading runs: in this process, or ahead of the step in one background process of the rank.

Both answer the same questions. The background process is forked before process groups, threads and GPU
contexts exist; it works on one request at a time, batches before records of the next step, and ends when its
rank does. Answers travel as plain bytes through a pipe: shared memory is small in containers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from secc.runtime.data.sample_loader import Collated, Loader, Rows, Share
from secc.runtime.data.sample_metadata import Record, Skipped
from secc.runtime.data.sample_workers import Fetchers
from secc.runtime.errors import UserError
from secc.runtime.host.child_processes import serve
from secc.runtime.host.fork_pool import REMEDY, Pool, attempt
from secc.runtime.model.item_seeds import borrowed

Ask = Share | Collated
RECORDED_AHEAD = 16  # where batches come with recordings of their glue: most of what a rank runs in a step
AHEAD = (
    3  # requests that the background process holds: the next step's share, a batch in work and one that waits
)


class Inline:
    """Loads in this process, when asked for the result."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def request(self, asks: Iterable[Ask]) -> None:
        """Nothing runs ahead here."""

    def ready(self, ask: Share) -> Rows | None:
        """The rows, if the samples load: what is wrong is said when the result is asked for."""
        found = attempt(self.result, ask)
        return found if isinstance(found, Rows) else None

    def result(self, ask: Ask) -> Any:
        """Rows for a Share, a batch for Collated. Raises UserError where a sample does not load."""
        if isinstance(ask, Collated):
            return self._loader.collated(ask)
        with borrowed():
            return self._loader.rows(list(self._loader.share(ask)))

    def close(self) -> None:
        """Nothing to end."""


class Background:
    """Loads in a process of its own, which has the help of `pools`. Make it before process groups, threads
    and GPU contexts: it forks.

    It works on up to `requests` before their results are asked for. A thread takes the answers as they come,
    so that it never waits. Shares are asked for up to `ahead` steps before batches.
    """

    def __init__(
        self, loader: Loader, pools: Sequence[Fetchers | Pool] = (), requests: int = AHEAD, ahead: int = 1
    ) -> None:
        self._pools, self._requests, self._ahead = pools, requests, ahead
        context = multiprocessing.get_context("fork")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(loader, far_end, self._pipe, os.getpid()), name="secc-loader", daemon=True
        )
        self._process.start()
        far_end.close()
        self._planned: dict[Ask, None] = {}  # in order, not sent yet
        self._sent: set[Ask] = set()
        self._answers: dict[Ask, Any] = {}
        self._came, self._gone = threading.Condition(), False
        self._taker = threading.Thread(target=self._take, name="secc-loader-answers", daemon=True)
        self._taker.start()

    def request(self, asks: Iterable[Ask]) -> None:
        """Work on `asks` ahead, in this order, after what was asked for before."""
        with self._came:
            self._planned |= {ask: None for ask in asks if ask not in self._sent and ask not in self._answers}
            self._send_ahead()

    def ready(self, ask: Share) -> Rows | None:
        """The rows, if they are here."""
        with self._came:
            there = isinstance(self._answers.get(ask), Rows)
        return self.result(ask) if there else None

    def result(self, ask: Ask) -> Any:
        """As `Inline.result`, waited for. Each answer is given once; a share ends the wait for batches of
        steps that are over."""
        with self._came:
            if isinstance(ask, Share):
                self._planned = {a: None for a in self._planned if a.step >= ask.step - self._ahead}
                self._answers = {
                    a: answer for a, answer in self._answers.items() if a.step >= ask.step - self._ahead
                }
            if ask not in self._sent and ask not in self._answers:
                self._send(ask)
            self._came.wait_for(lambda: self._gone or ask in self._answers)
            if ask not in self._answers:
                raise self._ended()
            answer = self._answers.pop(ask)
            self._send_ahead()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send_ahead(self) -> None:
        while self._planned and len(self._sent) + len(self._answers) < self._requests:
            self._send(next(iter(self._planned)))

    def _send(self, ask: Ask) -> None:
        self._planned.pop(ask, None)
        self._sent.add(ask)
        try:
            self._pipe.send_bytes(pickle.dumps(ask))
        except OSError:
            raise self._ended() from None

    def _take(self) -> None:
        """The thread: keep answers until they are asked for."""
        try:
            while True:
                ask, answer = pickle.loads(self._pipe.recv_bytes())
                with self._came:
                    self._sent.discard(ask)
                    self._answers[ask] = answer
                    self._came.notify_all()
        except (EOFError, OSError):
            with self._came:
                self._gone = True
                self._came.notify_all()

    def close(self) -> None:
        """End the processes."""
        self._process.terminate()
        self._process.join()
        self._taker.join(timeout=5)
        self._pipe.close()
        for pool in self._pools:
            pool.close()

    def _ended(self) -> UserError:
        self._process.join(timeout=5)
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return UserError(f"the process that loads this rank's samples {how}", remedy=REMEDY)


def _serve(loader: Loader, pipe: Connection, other_end: Connection, parent: int) -> None:
    """The background process: read requests, answer batches first, and work on shares sample by sample in
    between."""
    other_end.close()
    serve(parent)
    shares: deque[_Work] = deque()
    recordings = loader.recorders.connections if loader.recorders is not None else []
    try:
        while True:
            ready = wait([pipe, *recordings], 0 if shares else None)
            for ask, answer in loader.finished() if recordings else ():
                _send(pipe, ask, answer)
            if pipe in ready:
                ask = pickle.loads(pipe.recv_bytes())
                if isinstance(ask, Share):
                    shares.append(_Work(loader, ask))
                elif (answer := attempt(loader.begin, ask)) is not None:
                    _send(pipe, ask, answer)
            elif shares and shares[0].advance():
                work = shares.popleft()
                _send(pipe, work.ask, work.answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the rank is gone


class _Work:
    """A share in the making."""

    def __init__(self, loader: Loader, ask: Share) -> None:
        self.ask, self._loader, self._records = ask, loader, loader.share(ask)
        self._done: list[Record | Skipped] = []
        self.answer: Rows | Exception | None = None

    def advance(self) -> bool:
        """Make one record more; whether `answer` is there now."""
        record = attempt(next, self._records, None)
        if isinstance(record, Record | Skipped):
            self._done.append(record)
            return False
        self.answer = self._loader.rows(self._done) if record is None else record
        return True


def _send(pipe: Connection, ask: Ask, answer: Any) -> None:
    pipe.send_bytes(pickle.dumps((ask, answer)))
