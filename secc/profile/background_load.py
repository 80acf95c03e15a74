"""Keeps this machine as busy as the other ranks of a node would."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from secc.runtime.host.parent_death import die_with_parent


@contextmanager
def background_load(work: Callable[[], object], processes: int) -> Iterator[None]:
    """Run `work` over and over in `processes` forked processes within the context."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_repeat_forever, args=(work,), daemon=True) for _ in range(processes)]
    try:
        for process in workers:
            process.start()
        yield
    finally:
        for process in workers:
            process.kill()
            process.join()


def _repeat_forever(work: Callable[[], object]) -> None:
    die_with_parent()
    while True:
        work()
