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

from secc.runtime.data.sample_loader import BatchRequest, MetadataRequest, MetadataRows, SampleLoader
from secc.runtime.data.sample_metadata import SampleRecord, SkippedSample
from secc.runtime.data.sample_workers import SampleWorkers
from secc.runtime.errors import UserError
from secc.runtime.host.child_processes import prepare_worker_process
from secc.runtime.host.fork_pool import DEAD_WORKER_REMEDY, WorkerPool, run_capturing_errors
from secc.runtime.model.item_seeds import shared_rng_restore

LoaderRequest = MetadataRequest | BatchRequest
MAX_REQUESTS_WITH_RECORDING = (
    16  # where batches come with recordings of their glue: most of what a rank runs in a step
)
MAX_REQUESTS = (
    3  # requests that the background process holds: the next step's share, a batch in work and one that waits
)


class InlineLoader:
    """Loads in this process, when asked for the result."""

    def __init__(self, loader: SampleLoader) -> None:
        self._loader = loader

    def request_ahead(self, asks: Iterable[LoaderRequest]) -> None:
        """Nothing runs ahead here."""

    def take_if_ready(self, ask: MetadataRequest) -> MetadataRows | None:
        """The rows, if the samples load: what is wrong is said when the result is asked for."""
        found = run_capturing_errors(self.wait_for_result, ask)
        return found if isinstance(found, MetadataRows) else None

    def wait_for_result(self, ask: LoaderRequest) -> Any:
        """Rows for a Share, a batch for Collated. Raises UserError where a sample does not load."""
        if isinstance(ask, BatchRequest):
            return self._loader.load_batch(ask)
        with shared_rng_restore():
            return self._loader.pack_rows(list(self._loader.iter_records(ask)))

    def close(self) -> None:
        """Nothing to end."""


class LoaderProcess:
    """Loads in a process of its own, which has the help of `pools`. Make it before process groups, threads
    and GPU contexts: it forks.

    It works on up to `requests` before their results are asked for. A thread takes the answers as they come,
    so that it never waits. Shares are asked for up to `ahead` steps before batches.
    """

    def __init__(
        self,
        loader: SampleLoader,
        pools: Sequence[SampleWorkers | WorkerPool] = (),
        requests: int = MAX_REQUESTS,
        ahead: int = 1,
    ) -> None:
        self._pools, self._requests, self._ahead = pools, requests, ahead
        context = multiprocessing.get_context("fork")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(
            target=_run_loader_process,
            args=(loader, far_end, self._pipe, os.getpid()),
            name="secc-loader",
            daemon=True,
        )
        self._process.start()
        far_end.close()
        self._planned: dict[LoaderRequest, None] = {}  # in order, not sent yet
        self._sent: set[LoaderRequest] = set()
        self._answers: dict[LoaderRequest, Any] = {}
        self._answer_arrived, self._process_gone = threading.Condition(), False
        self._receiver_thread = threading.Thread(
            target=self._receive_answers, name="secc-loader-answers", daemon=True
        )
        self._receiver_thread.start()

    def request_ahead(self, asks: Iterable[LoaderRequest]) -> None:
        """Work on `asks` ahead, in this order, after what was asked for before."""
        with self._answer_arrived:
            self._planned |= {ask: None for ask in asks if ask not in self._sent and ask not in self._answers}
            self._send_ahead()

    def take_if_ready(self, ask: MetadataRequest) -> MetadataRows | None:
        """The rows, if they are here."""
        with self._answer_arrived:
            there = isinstance(self._answers.get(ask), MetadataRows)
        return self.wait_for_result(ask) if there else None

    def wait_for_result(self, ask: LoaderRequest) -> Any:
        """As `Inline.result`, waited for. Each answer is given once; a share ends the wait for batches of
        steps that are over."""
        with self._answer_arrived:
            if isinstance(ask, MetadataRequest):
                self._planned = {a: None for a in self._planned if a.step >= ask.step - self._ahead}
                self._answers = {
                    a: answer for a, answer in self._answers.items() if a.step >= ask.step - self._ahead
                }
            if ask not in self._sent and ask not in self._answers:
                self._send_request(ask)
            self._answer_arrived.wait_for(lambda: self._process_gone or ask in self._answers)
            if ask not in self._answers:
                raise self._process_ended_error()
            answer = self._answers.pop(ask)
            self._send_ahead()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send_ahead(self) -> None:
        while self._planned and len(self._sent) + len(self._answers) < self._requests:
            self._send_request(next(iter(self._planned)))

    def _send_request(self, ask: LoaderRequest) -> None:
        self._planned.pop(ask, None)
        self._sent.add(ask)
        try:
            self._pipe.send_bytes(pickle.dumps(ask))
        except OSError:
            raise self._process_ended_error() from None

    def _receive_answers(self) -> None:
        """The thread: keep answers until they are asked for."""
        try:
            while True:
                ask, answer = pickle.loads(self._pipe.recv_bytes())
                with self._answer_arrived:
                    self._sent.discard(ask)
                    self._answers[ask] = answer
                    self._answer_arrived.notify_all()
        except (EOFError, OSError):
            with self._answer_arrived:
                self._process_gone = True
                self._answer_arrived.notify_all()

    def close(self) -> None:
        """End the processes."""
        self._process.terminate()
        self._process.join()
        self._receiver_thread.join(timeout=5)
        self._pipe.close()
        for pool in self._pools:
            pool.close()

    def _process_ended_error(self) -> UserError:
        self._process.join(timeout=5)
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return UserError(f"the process that loads this rank's samples {how}", remedy=DEAD_WORKER_REMEDY)


def _run_loader_process(loader: SampleLoader, pipe: Connection, other_end: Connection, parent: int) -> None:
    """The background process: read requests, answer batches first, and work on shares sample by sample in
    between."""
    other_end.close()
    prepare_worker_process(parent)
    shares: deque[_MetadataWork] = deque()
    recordings = loader.recorders.connections if loader.recorders is not None else []
    try:
        while True:
            ready = wait([pipe, *recordings], 0 if shares else None)
            for ask, answer in loader.take_finished_batches() if recordings else ():
                _send_answer(pipe, ask, answer)
            if pipe in ready:
                ask = pickle.loads(pipe.recv_bytes())
                if isinstance(ask, MetadataRequest):
                    shares.append(_MetadataWork(loader, ask))
                elif (answer := run_capturing_errors(loader.begin_batch, ask)) is not None:
                    _send_answer(pipe, ask, answer)
            elif shares and shares[0].load_next_record():
                work = shares.popleft()
                _send_answer(pipe, work.ask, work.answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the rank is gone


class _MetadataWork:
    """A share in the making."""

    def __init__(self, loader: SampleLoader, ask: MetadataRequest) -> None:
        self.ask, self._loader, self._records = ask, loader, loader.iter_records(ask)
        self._done: list[SampleRecord | SkippedSample] = []
        self.answer: MetadataRows | Exception | None = None

    def load_next_record(self) -> bool:
        """Make one record more; whether `answer` is there now."""
        record = run_capturing_errors(next, self._records, None)
        if isinstance(record, SampleRecord | SkippedSample):
            self._done.append(record)
            return False
        self.answer = self._loader.pack_rows(self._done) if record is None else record
        return True


def _send_answer(pipe: Connection, ask: LoaderRequest, answer: Any) -> None:
    pipe.send_bytes(pickle.dumps((ask, answer)))
