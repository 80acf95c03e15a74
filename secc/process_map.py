"""Independent work on all cores, in forked copies of this process: `mapped` runs a function over items,
`mapping` over items that come round by round, `beside` one beside other work.

A copy has everything that is loaded and made here, which takes seconds to load and much to send; only results
travel. They come in the items' order, so that nothing hangs on the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

LOW_PRIORITY_NICENESS = 10  # added to the niceness

_forked_work: Callable[[Any], Any] | None = None  # what copies find here when they are made


def map_in_processes(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """`function` of each item, which must not change what others read; results are pickled. Raises what
    `function` raises."""
    found = list(items)

    def at(place: int) -> ResultT:
        return function(found[place])

    with process_mapper(at, len(found)) as run:
        return run(range(len(found)))


@contextmanager
def process_mapper(
    function: Callable[[ItemT], ResultT], most: int = 1 << 16
) -> Iterator[Callable[[Sequence[ItemT]], list[ResultT]]]:
    """What gives `function` of each of some items, as often as it is called; items are pickled, too.

    The copies, `most` at most, are made when it is called with several items first, and keep what `function`
    remembers.
    """
    with ExitStack() as stack:
        pools: list[ProcessPoolExecutor] = []

        def run(items: Sequence[ItemT]) -> list[ResultT]:
            workers = min(available_cores(), most)
            if min(workers, len(items)) < 2:
                return [function(item) for item in items]
            if not pools:
                pools.append(stack.enter_context(_make_pool(workers)))
            with _set_forked_work(function):
                found = pools[0].map(_call_forked_work, items)  # forks now, the first time
            return [*found]

        yield run


@contextmanager
def run_in_background(
    function: Callable[[], ResultT], patient: bool = False
) -> Iterator[Callable[[], ResultT]]:
    """Run `function` in a copy while the block runs here; what is given waits for its result. With one core
    it runs then, and here.

    A `patient` copy leaves cores to this process and its other copies where these need them.
    """
    if available_cores() < 2:
        yield function
        return
    with _make_pool(1, patient) as pool:
        with _set_forked_work(lambda _: function()):
            found = pool.submit(_call_forked_work, None)  # forks now
        yield found.result


def _make_pool(workers: int, patient: bool = False) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_init_worker, initargs=(patient,)
    )


@contextmanager
def _set_forked_work(work: Callable[[Any], Any]) -> Iterator[None]:
    """Copies that are made in the block find this work."""
    global _forked_work
    _forked_work = work
    try:
        yield
    finally:
        _forked_work = None


def available_cores() -> int:
    """The cores that this process may use, 1 where it cannot be copied or is itself somebody's worker."""
    forks = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
    return (
        len(os.sched_getaffinity(0))
        if forks and hasattr(os, "sched_getaffinity") and _forked_work is None
        else 1
    )


def _init_worker(patient: bool = False) -> None:
    """A copy has none of the threads that torch computes with here, and must not wait for them."""
    torch.set_num_threads(1)
    os.nice(LOW_PRIORITY_NICENESS if patient else 0)


def _call_forked_work(item: Any) -> Any:
    assert _forked_work is not None
    return _forked_work(item)
