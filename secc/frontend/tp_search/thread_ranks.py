"""Ranks as threads of this process: enough to run a small module as a tensor-parallel replica runs it,
with gradients.

Autograd runs a CPU backward in the thread that calls it, so threads can meet in a collective there too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

RANK_TIMEOUT_SECONDS = 60.0  # seconds that a rank waits for the others


class ThreadExchange:
    """Exchanges one tensor of each rank with all ranks."""

    def __init__(self, size: int) -> None:
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=RANK_TIMEOUT_SECONDS)

    def exchange_tensors(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.barrier.wait()
        self.tensors[index] = tensor.detach().clone()
        self.barrier.wait()
        return list(self.tensors)


class ThreadGroup:
    """A `Group` of `secc.runtime.tensor_parallel.group` with threads as ranks."""

    def __init__(self, index: int, size: int, meeting: ThreadExchange) -> None:
        self.index, self.size, self._exchange = index, size, meeting

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `tensor`, of any shape, by its sum over all threads, and returns it."""
        with torch.no_grad():
            total = torch.stack(self._exchange.exchange_tensors(self.index, tensor)).sum(0)
            return tensor.copy_(total)

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Replaces `tensor`, of any shape, by its sum over all threads; there is nothing left to wait for."""
        self.all_reduce(tensor)
        return lambda: None

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenates the 1-D tensors of all threads; `lengths` are their lengths."""
        return torch.cat(self._exchange.exchange_tensors(self.index, tensor))

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Sums a 1-D tensor over all threads and returns this thread's part; `lengths` are the lengths of the
        parts."""
        return self.all_reduce(tensor.clone()).split(list(lengths))[self.index].clone()

    def start_reduce_scatter(
        self, tensor: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Returns what `reduce_scatter` does; there is nothing left to wait for."""
        return self.reduce_scatter(tensor, lengths), lambda: None

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends the first `sent[0]` rows (along dim 0) to thread 0 and so on; returns `received[0]` rows of
        thread 0, then those of thread 1 and so on."""
        counts = self._exchange.exchange_tensors(self.index, torch.tensor(sent))
        parts = [
            values.split(lengths.tolist())[self.index]
            for values, lengths in zip(self._exchange.exchange_tensors(self.index, rows), counts, strict=True)
        ]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)


def run_thread_ranks(count: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Runs `work(group)` on `count` ranks and returns the results in order. Raises what the first failing
    rank raised."""
    meeting = ThreadExchange(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work(ThreadGroup(index, count, meeting))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    if meeting.barrier.broken:
        raise RuntimeError("the ranks of a replica do not meet")
    return results
