"""Runs independent work on all cores, in forked copies of this process.

`map_in_processes` maps a function over items, `process_mapper` over items that come in rounds, and
`run_in_background` runs one function while this process works on. A forked copy already has every library and
object that is loaded here, which would take seconds to import or pickle; only results are pickled. Results
come in the order of the items, so that nothing depends on the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from secc.runtime.host.cpu_cores import available_cores

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

LOW_PRIORITY_NICENESS = 10  # added to the niceness

_forked_work: Callable[[Any], Any] | None = None  # what copies find here when they are made


def map_in_processes(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Returns `function(item)` for each item, in order.

    `function` must not change state that others read; its results are pickled. Raises what `function` raises.
    """
    listed = list(items)

    def call_at(place: int) -> ResultT:
        return function(listed[place])

    with process_mapper(call_at, len(listed)) as run:
        return run(range(len(listed)))


@contextmanager
def process_mapper(
    function: Callable[[ItemT], ResultT], max_workers: int = 1 << 16
) -> Iterator[Callable[[Sequence[ItemT]], list[ResultT]]]:
    """Context manager: yields a function that maps `function` over the items of one round.

    The forked copies, `max_workers` at most, are made in the first round with several items, and keep what
    `function` remembers between rounds. Items are pickled too.
    """
    with ExitStack() as stack:
        pools: list[ProcessPoolExecutor] = []

        def run(items: Sequence[ItemT]) -> list[ResultT]:
            workers = min(max_forked_workers(), max_workers)
            if min(workers, len(items)) < 2:
                return [function(item) for item in items]
            if not pools:
                pools.append(stack.enter_context(_make_pool(workers)))
            with _set_forked_work(function):
                results = pools[0].map(_call_forked_work, items)  # forks now, the first time
            return [*results]

        yield run


@contextmanager
def run_in_background(
    function: Callable[[], ResultT], low_priority: bool = False, forks: bool = True
) -> Iterator[Callable[[], ResultT]]:
    """Context manager: runs `function` in a forked copy while the block runs here; yields a call that waits
    for the result.

    With one core, or without `forks` for work that takes less time than a fork, `function` runs in this
    process when the result is asked for. A `low_priority` copy yields cores to other processes.
    """
    if not forks or max_forked_workers() < 2:
        yield function
        return
    with _make_pool(1, low_priority) as pool:
        with _set_forked_work(lambda _: function()):
            future = pool.submit(_call_forked_work, None)  # forks now
        yield future.result


def _make_pool(workers: int, low_priority: bool = False) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_init_worker, initargs=(low_priority,)
    )


@contextmanager
def _set_forked_work(work: Callable[[Any], Any]) -> Iterator[None]:
    """Sets the work that copies forked in the block will find."""
    global _forked_work
    _forked_work = work
    try:
        yield
    finally:
        _forked_work = None


def max_forked_workers() -> int:
    """Returns how many forked workers may run at a time: one on each core that this process may use; 1 if it
    cannot be forked or is itself a forked worker."""
    forks = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
    return available_cores() if forks and hasattr(os, "sched_getaffinity") and _forked_work is None else 1


def _init_worker(low_priority: bool = False) -> None:
    """Initialises a forked copy: torch's threads do not survive the fork, and waiting for them would hang."""
    torch.set_num_threads(1)
    os.nice(LOW_PRIORITY_NICENESS if low_priority else 0)


def _call_forked_work(item: Any) -> Any:
    assert _forked_work is not None
    return _forked_work(item)
