"""A pool of forked processes that do the same work in parallel for a rank's loader: loading samples,
recording glue.

They are forked together with the loader, which gives them work and collects results in any order. Each
process holds few requests at a time, so the two ends of a pipe never both block in a send.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection, wait
from typing import Any

from secc.runtime.errors import LostProcess, UserError
from secc.runtime.host.child_processes import prepare_worker_process

DEAD_WORKER_REMEDY = (
    "the host may be out of memory; with --workers 0 samples load in the training process, "
    "which shows what happens"
)


class WorkerPool:
    """`count` forked processes that compute `work(*arguments)`.

    Create it before threads, process groups and GPU contexts, because of the fork. Each process holds up to
    `max_requests` requests: two if requests are small, so that one waits while another is computed, else one.
    """

    def __init__(self, work: Callable[..., Any], count: int, name: str, max_requests: int) -> None:
        context = multiprocessing.get_context("fork")
        self._max_requests, self._request_counts, self._processes = (
            max_requests,
            dict[Connection, int](),
            dict[Connection, Any](),
        )
        for _ in range(count):
            pipe, far_end = context.Pipe()
            process = context.Process(
                target=_serve_requests, args=(work, far_end, os.getpid(), name), name=name, daemon=True
            )
            process.start()
            far_end.close()
            self._request_counts[pipe], self._processes[pipe] = 0, process
        self._queued: deque[tuple[Hashable, tuple[Any, ...]]] = deque()

    @property
    def connections(self) -> list[Connection]:
        """The connections that become readable when `collect_results` has a result."""
        return list(self._request_counts)

    def submit_work(self, token: Hashable, *arguments: Any) -> None:
        """Queues `work(*arguments)`; `token` names the result. Raises LostProcess if a process has ended."""
        self._queued.append((token, arguments))
        self._send_queued()

    def collect_results(self, timeout: float | None = None) -> list[tuple[Any, Any]]:
        """Waits for a result, for at most `timeout` seconds, and returns (token, result) of all that have
        arrived.

        A result may be an exception. Raises LostProcess if a process has ended, once for each.
        """
        results: list[tuple[Any, Any]] = []
        for pipe in wait(self.connections, timeout):
            assert isinstance(pipe, Connection)
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, OSError):
                raise self._drop_process(pipe) from None
            self._request_counts[pipe] -= 1
        self._send_queued()
        return results

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in self._processes.items():
            pipe.close()
            process.kill()
            process.join()

    def _send_queued(self) -> None:
        while self._queued:
            if not self._request_counts:
                raise LostProcess("no helper process of this rank is left", remedy=DEAD_WORKER_REMEDY)
            pipe = min(self._request_counts, key=lambda p: self._request_counts[p])
            if self._request_counts[pipe] >= self._max_requests:
                return
            self._request_counts[pipe] += 1
            try:
                pipe.send_bytes(pickle.dumps(self._queued.popleft()))
            except OSError:
                raise self._drop_process(pipe) from None

    def _drop_process(self, pipe: Connection) -> LostProcess:
        """Forgets a process that has ended: it is not waited for again. Returns the error to raise."""
        del self._request_counts[pipe]
        name = self._processes[pipe].name
        return LostProcess(f"a {name} process of this rank has ended unexpectedly", remedy=DEAD_WORKER_REMEDY)


def run_capturing_errors(work: Callable[..., Any], *arguments: Any) -> Any:
    """Returns work(*arguments), or the exception to raise in the rank: a UserError as it is, others as a
    RuntimeError with their traceback.
    """
    try:
        return work(*arguments)
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(f"a process of this rank failed\n{traceback.format_exc()}")


def _serve_requests(work: Callable[..., Any], pipe: Connection, parent: int, name: str) -> None:
    prepare_worker_process(parent, name)
    try:
        while True:
            token, arguments = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps((token, run_capturing_errors(work, *arguments))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the loader is gone
