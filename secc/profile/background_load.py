"""Other processes that keep this machine as busy as a node's other ranks would."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from secc.runtime.host.child_processes import die_with_parent


@contextmanager
def background_load(work: Callable[[], object], processes: int) -> Iterator[None]:
    """While the body runs, so many forked processes do `work` over and over."""
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_repeat_forever, args=(work,), daemon=True) for _ in range(processes)]
    try:
        for process in others:
            process.start()
        yield
    finally:
        for process in others:
            process.kill()
            process.join()


def _repeat_forever(work: Callable[[], object]) -> None:
    die_with_parent()
    while True:
        work()
