"""Pools of helper processes: results in any order, and one clear error for a process that was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from secc.runtime.errors import LostProcess
from secc.runtime.host.fork_pool import WorkerPool


def work(number: int) -> tuple[int, int]:
    if number < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number, os.getpid()


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(work, 2, "secc-test", 1)
    yield made
    made.close()


def test_all_results_come(pool: WorkerPool) -> None:
    for number in range(5):
        pool.submit_work(number, number)
    found: dict[int, int] = {}
    while len(found) < 5:
        found |= {token: result[0] for token, result in pool.collect_results()}
    assert found == {number: number * number for number in range(5)}


def test_a_killed_process_is_said_once_and_others_go_on(pool: WorkerPool) -> None:
    pool.submit_work("dies", -1)
    with pytest.raises(LostProcess, match="a secc-test process of this rank has ended unexpectedly"):
        pool.collect_results()
    assert len(pool.connections) == 1
    pool.submit_work("lives", 3)
    assert [(token, result[0]) for token, result in pool.collect_results()] == [("lives", 9)]


def test_a_process_killed_while_idle_is_said_when_it_gets_work(pool: WorkerPool) -> None:
    for process in pool._processes.values():
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    for _ in range(2):
        with pytest.raises(LostProcess, match="has ended unexpectedly"):
            pool.submit_work("late", 1)
    with pytest.raises(LostProcess, match="no helper process of this rank is left"):
        pool.submit_work("late", 1)
