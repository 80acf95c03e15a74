"""A run that makes no progress ends within its limit, and names the rank and process that is the cause."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.captioner_plans import FIXTURE, UNEVEN, write_plan
from tests.runtime.run_processes import (
    helper_of_rank,
    loader_of_rank,
    process_of_rank,
    ranks_of,
    start_run,
    wait_for_step,
    wait_until,
)

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]


def test_stopped_rank_is_blamed_with_the_stacks_of_all(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000", "--hang-timeout", "4")
    wait_for_step(plan, 3, process)
    victim = process_of_rank(plan, 1)
    os.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    _, errors = process.communicate(timeout=300)
    assert time.monotonic() - stopped < 30
    assert process.returncode == 1
    assert "error: the run makes no progress: rank 1 did not answer" in errors
    assert f"rank 1 does not answer: process {victim} is stopped" in errors
    assert "rank 0 waits for other ranks in" in errors and "Traceback" not in errors
    stacks = (plan / "logs" / "hang.txt").read_text()
    for rank in range(3):
        assert "/ranks/rank_0000" in stacks.partition(f"\nrank {rank}\n")[2].partition("\nrank")[0]
    assert not list(ranks_of(plan))


def test_rank_that_is_stopped_as_it_starts_is_blamed(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "10", "--hang-timeout", "5")
    wait_until(lambda: len(list(ranks_of(plan))) == 3, process)
    victim = process_of_rank(plan, 1)
    os.kill(victim, signal.SIGSTOP)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"error: the run makes no progress: rank 1 (process {victim}) is stopped" in errors
    assert "what to do: " in errors and not list(ranks_of(plan))


def test_stopped_loader_is_blamed(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000", "--hang-timeout", "4")
    wait_for_step(plan, 3, process)
    os.kill(loader_of_rank(plan, 2), signal.SIGSTOP)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "error: the run makes no progress: the loader of rank 2 brings no samples" in errors
    assert "_run_loader_process" in (plan / "logs" / "hang.txt").read_text()


def test_stopped_writer_is_blamed_within_the_limit(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    saves = ["--save", str(tmp_path / "saved"), "--save-every", "3", "--keep", "2"]
    process = start_run(plan, "--steps", "1000000", "--hang-timeout", "10", *saves)
    wait_for_step(plan, 4, process)
    writer = helper_of_rank(plan, 1, "secc-writer")
    os.kill(writer, signal.SIGSTOP)
    stopped = time.monotonic()
    _, errors = process.communicate(timeout=300)
    assert time.monotonic() - stopped < 25  # and not 6 times the limit; 6 s of it for answers
    assert process.returncode == 1
    assert (
        "the run makes no progress: the process that writes checkpoints of rank 1 does not finish" in errors
    )
    assert f"its secc-writer (process {writer}) is stopped" in errors


@pytest.mark.parametrize("workers", ["0", "1"])
def test_stuck_dataset_is_named_by_its_stack(tmp_path: Path, workers: str) -> None:
    before = "        g = torch.Generator()"
    line = "        if i == 13: __import__('time').sleep(1000)  # stuck here\n"
    source = (FIXTURE / "model.py").read_text().replace(before, line + before)
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN, source=source)
    process = start_run(plan, "--steps", "1000000", "--hang-timeout", "5", "--workers", workers)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "brings no samples" in errors
    number = 1 + source.splitlines().index(line.rstrip("\n"))
    assert f'model.py", line {number} in __getitem__' in (plan / "logs" / "hang.txt").read_text()


def test_killed_loader_names_its_rank_and_is_worth_a_restart(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    options = ["--steps", "40", "--save", str(tmp_path / "saved"), "--save-every", "10"]
    process = start_run(plan, *options, "--max-restarts", "1")
    wait_for_step(plan, 12, process)
    os.kill(loader_of_rank(plan, 2), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "error: rank 2: the process that loads this rank's samples was killed by SIGKILL" in errors
    assert "restart 1 of 1 in 1 s" in errors
