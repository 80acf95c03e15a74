"""The launcher: who may meet its ranks, what it leaves behind, and how it passes signals on."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from tests.runtime.captioner_plans import UNEVEN, write_plan
from tests.runtime.run_processes import listening_addresses, ranks_of, start_run, wait_for_step, wait_until

pytestmark = pytest.mark.gloo


def test_nothing_listens_beyond_this_machine_and_strangers_cannot_join(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000")
    wait_for_step(plan, 1, process)
    assert listening_addresses([process.pid]) == set()
    assert listening_addresses(pid for pid, _ in ranks_of(plan)) == {"127.0.0.1"}
    variables = Path(f"/proc/{next(ranks_of(plan))[0]}/environ").read_bytes().split(b"\0")
    store = Path(next(v for v in variables if v.startswith(b"SECC_STORE=")).decode().partition("=")[2])
    assert store.exists() and stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    process.kill()
    process.communicate()
    wait_until(lambda: not list(ranks_of(plan)))


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.5])
def test_launcher_killed_while_ranks_start_leaves_no_process(tmp_path: Path, delay: float) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, UNEVEN)
    process = start_run(plan, "--steps", "1000000")
    wait_until(lambda: list(ranks_of(plan)), process)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not list(ranks_of(plan)))
