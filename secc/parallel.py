"""Independent work on all cores, in forked copies of this process: `mapped` runs a function over items, `beside` one beside other work.

A copy has everything that is loaded and made here, which takes seconds to load and much to send; only results travel. They come in the
items' order, so that nothing hangs on the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE = 10  # added to the niceness

_work: tuple[Callable[[Any], Any], list[Any]] | None = None  # what copies find here when they are made


def mapped(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`function` of each item, which must not change what others read; results are pickled. Raises what `function` raises."""
    global _work
    found = list(items)
    workers = min(cores(), len(found))
    if workers < 2:
        return [function(item) for item in found]
    _work = function, found
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_alone) as pool:
            return list(pool.map(_result, range(len(found))))
    finally:
        _work = None


@contextmanager
def beside(function: Callable[[], Result], patient: bool = False) -> Iterator[Callable[[], Result]]:
    """Run `function` in a copy while the block runs here; what is given waits for its result. With one core it runs then, and here.

    A `patient` copy leaves cores to this process and its other copies where these need them.
    """
    global _work
    if cores() < 2:
        yield function
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=_alone, initargs=(patient,)) as pool:
        _work = (lambda _: function()), [None]
        try:
            found = pool.submit(_result, 0)  # forks now
        finally:
            _work = None
        yield found.result


def cores() -> int:
    """The cores that this process may use, 1 where it cannot be copied or is itself somebody's worker."""
    forks = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
    return len(os.sched_getaffinity(0)) if forks and hasattr(os, "sched_getaffinity") and _work is None else 1


def _alone(patient: bool = False) -> None:
    """A copy has none of the threads that torch computes with here, and must not wait for them."""
    torch.set_num_threads(1)
    os.nice(PATIENCE if patient else 0)


def _result(index: int) -> Any:
    assert _work is not None
    function, items = _work
    return function(items[index])
