"""Runs loading in the rank's own process, or ahead of the step in one background process.

InlineLoader and LoaderProcess have the same methods. The background process is forked before process groups,
threads and GPU contexts exist. It works on one request at a time, batches before the metadata of the next
step, and ends when its rank does. Answers travel as plain bytes through a pipe, because shared memory is
small in containers.
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

from secc.runtime.data.sample_loader import (
    BatchRequest,
    MetadataRequest,
    MetadataRows,
    SampleLoader,
    StreamProgress,
)
from secc.runtime.data.sample_metadata import SampleRecord, SkippedSample
from secc.runtime.data.sample_workers import SampleWorkers
from secc.runtime.errors import LostProcess
from secc.runtime.host.child_processes import allow_child_processes, prepare_worker_process
from secc.runtime.host.fork_pool import DEAD_WORKER_REMEDY, WorkerPool, run_capturing_errors
from secc.runtime.host.hidden_ranks import hide_ranks
from secc.runtime.model.item_seeds import shared_rng_restore

LoaderRequest = MetadataRequest | BatchRequest
# Requests that the background process holds: the next step's metadata, a batch in work and one waiting.
MAX_REQUESTS = 3
# If glue is recorded: most micro-batches that a rank runs in a step, since a recording may take long.
MAX_REQUESTS_WITH_RECORDING = 16


class InlineLoader:
    """Loads in this process when the result is asked for."""

    def __init__(self, loader: SampleLoader) -> None:
        self._loader = loader

    def request_ahead(self, asks: Iterable[LoaderRequest]) -> None:
        """Do nothing: there is no process that could work ahead."""

    def take_if_ready(self, ask: MetadataRequest) -> MetadataRows | None:
        """Return the rows if the samples load; None otherwise. Errors are raised by `wait_for_result`."""
        answer = run_capturing_errors(self.wait_for_result, ask)
        return answer if isinstance(answer, MetadataRows) else None

    def wait_for_result(self, ask: LoaderRequest) -> Any:
        """Return MetadataRows for a MetadataRequest, a batch for a BatchRequest. Raises UserError if a
        sample does not load."""
        if isinstance(ask, BatchRequest):
            return self._loader.load_batch(ask)
        with shared_rng_restore():
            return self._loader.pack_rows(ask, list(self._loader.iter_records(ask)))

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class LoaderProcess:
    """Loads in one background process, helped by the processes of `pools`. It forks: make it before process
    groups, threads and GPU contexts.

    At most `requests` requests are sent before their results are taken. Metadata is requested up to `ahead`
    steps before batches. A thread receives the answers, so that the background process never waits in a send.
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
        self._planned: dict[LoaderRequest, None] = {}  # not sent yet, in order
        self._sent: set[LoaderRequest] = set()
        self._answers: dict[LoaderRequest, Any] = {}
        self._answer_arrived, self._process_gone = threading.Condition(), False
        self._receiver_thread = threading.Thread(
            target=self._receive_answers, name="secc-loader-answers", daemon=True
        )
        self._receiver_thread.start()

    def request_ahead(self, asks: Iterable[LoaderRequest]) -> None:
        """Queue requests behind those queued before."""
        with self._answer_arrived:
            self._planned |= {ask: None for ask in asks if ask not in self._sent and ask not in self._answers}
            self._send_ahead()

    def take_if_ready(self, ask: MetadataRequest) -> MetadataRows | None:
        """Return the rows if they have arrived, else None."""
        with self._answer_arrived:
            arrived = isinstance(self._answers.get(ask), MetadataRows)
        return self.wait_for_result(ask) if arrived else None

    def wait_for_result(self, ask: LoaderRequest) -> Any:
        """Wait for a result as `InlineLoader.wait_for_result` returns it. Each answer is given once.

        A MetadataRequest drops the requests and answers of steps that are over.
        """
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
        """Run by the thread: store answers until they are asked for."""
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
        """End the background process and its pools."""
        self._process.kill()
        self._process.join()
        self._receiver_thread.join(timeout=5)
        self._pipe.close()
        for pool in self._pools:
            pool.close()

    def _process_ended_error(self) -> LostProcess:
        """Return the error that says how the background process ended."""
        self._process.join(timeout=5)
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return LostProcess(f"the process that loads this rank's samples {how}", remedy=DEAD_WORKER_REMEDY)


def _run_loader_process(loader: SampleLoader, pipe: Connection, other_end: Connection, parent: int) -> None:
    """Run the background process: read requests, answer batches first, and make metadata sample by sample
    in between."""
    other_end.close()
    prepare_worker_process(parent, "secc-loader")
    if loader.streams is not None:
        hide_ranks()
        allow_child_processes()
    shares: deque[_MetadataWork] = deque()
    try:
        while True:
            recordings = loader.recorders.connections if loader.recorders is not None else []
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
    """A MetadataRequest in work."""

    def __init__(self, loader: SampleLoader, ask: MetadataRequest) -> None:
        self.ask, self._loader, self._records = ask, loader, loader.iter_records(ask)
        self._done: list[SampleRecord | SkippedSample | StreamProgress] = []
        self.answer: MetadataRows | Exception | None = None

    def load_next_record(self) -> bool:
        """Make one more record, or read one more sample of a stream. Returns whether `answer` is
        complete."""
        record = run_capturing_errors(next, self._records, None)
        if isinstance(record, SampleRecord | SkippedSample | StreamProgress):
            self._done.append(record)
            return False
        self.answer = (
            run_capturing_errors(self._loader.pack_rows, self.ask, self._done) if record is None else record
        )
        return True


def _send_answer(pipe: Connection, ask: LoaderRequest, answer: Any) -> None:
    pipe.send_bytes(pickle.dumps((ask, answer)))
