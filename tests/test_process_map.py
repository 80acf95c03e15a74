"""Work in forked copies of this process."""

from __future__ import annotations

import os

import pytest

from secc import process_map
from secc.errors import UserError


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_results_come_from_other_processes_in_order(two_cores: None) -> None:
    factor = 3
    found = process_map.map_in_processes(lambda n: (factor * n, os.getpid()), range(6))
    assert [n for n, _ in found] == [0, 3, 6, 9, 12, 15]
    assert os.getpid() not in {process for _, process in found}


def test_forked_processes_stay_between_rounds(two_cores: None) -> None:
    seen: list[int] = []

    def work(n: int) -> tuple[int, list[int]]:
        seen.append(n)
        return os.getpid(), list(seen)

    items = [[1, 2, 3], [4, 5, 6], [8, 9, 10]]  # one of two processes works in two of these rounds
    with process_map.process_mapper(work) as run:
        rounds = [run(some) for some in items]
        assert run([7]) == [(os.getpid(), [7])] and seen == [7], "one item is done here"
    copies = {process for found in rounds for process, _ in found}
    assert len(copies) <= 2 and os.getpid() not in copies
    remembered = [set(known) for found in rounds for _, known in found]
    assert any(sum(bool(known & set(some)) for some in items) > 1 for known in remembered)


def test_forked_processes_do_not_fork(two_cores: None) -> None:
    found = process_map.map_in_processes(
        lambda n: {os.getpid(), *process_map.map_in_processes(lambda _: os.getpid(), range(3))}, range(2)
    )
    assert [len(some) for some in found] == [1, 1]


def test_one_function_runs_in_the_background(two_cores: None) -> None:
    with process_map.run_in_background(os.getpid) as process:
        here = [os.getpid(), *process_map.map_in_processes(lambda n: n, range(2))]
        assert here == [os.getpid(), 0, 1] and process() != os.getpid()


def test_short_work_runs_in_this_process(two_cores: None) -> None:
    with process_map.run_in_background(os.getpid, forks=False) as process:
        assert process() == os.getpid()


def test_a_low_priority_process_is_nicer(two_cores: None) -> None:
    with (
        process_map.run_in_background(lambda: os.nice(0), low_priority=True) as patient,
        process_map.run_in_background(lambda: os.nice(0)) as other,
    ):
        assert patient() > other() == os.nice(0)


def test_errors_are_raised_unchanged(two_cores: None) -> None:
    def refuse(_: int) -> None:
        raise UserError("no", "model.py:1", "say yes")

    with pytest.raises(UserError, match="no") as error:
        process_map.map_in_processes(refuse, range(2))
    assert error.value.remedy == "say yes"


def test_one_core_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert process_map.map_in_processes(lambda _: os.getpid(), range(2)) == [os.getpid()] * 2
    with process_map.run_in_background(os.getpid) as process:
        assert process() == os.getpid()
