"""The short form of `tools.chaos`: a few faults, after which the weights are bit-equal."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runtime.run_processes import start, wait_until
from tools.chaos import __main__ as chaos
from tools.chaos import cases as chaos_cases
from tools.chaos.moments import MOMENTS


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_runs_survive_faults(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--cases", "6", "--seed", "5"]) == 0
    assert "6 of 6 cases passed" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_call_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    command = ["-m", "tools.chaos", "--cases", "1", "--folder", str(tmp_path)]
    process = start(*command)
    # Python's forked processes have the command line of the first.
    wait_until(lambda: list(tmp_path.glob("*/messages")), process)
    wait_until(lambda: len(processes_with(str(tmp_path))) > 3, process)
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_until(lambda: not processes_with(str(tmp_path)))


def processes_with(text: str) -> list[str]:
    """Returns the command lines of processes that have a text in theirs."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [line] if text in (line := path.read_text(errors="replace")) else []
    return found


def test_cases_are_drawn_from_their_seed() -> None:
    cases = chaos_cases.draw_cases(400, 3)
    assert cases == chaos_cases.draw_cases(400, 3) and cases != chaos_cases.draw_cases(400, 4)
    kinds = {(c.fault, c.process, c.moment) for c in cases}
    assert len(kinds) == sum(
        chaos_cases.is_possible(f, p, m)
        for f in chaos_cases.FAULTS
        for p in chaos_cases.PROCESSES
        for m in MOMENTS
    )


def test_an_error_without_a_remedy_is_found() -> None:
    restarted = "error: rank 1 died\nrestart 1 of 2 in 1 s from the beginning\n"
    explained = "error: full disk\n  what to do: make room\n"
    assert not chaos._find_lonely_error(restarted + explained)  # pyright: ignore
    assert chaos._find_lonely_error("error: rank 1 died\n" + explained)  # pyright: ignore
