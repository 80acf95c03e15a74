"""Processes that were stopped for a while are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from secc.runtime.host.process_table import (
    STOPPED,
    StoppedProcesses,
    find_descendants,
    process_name,
    process_state,
)


def test_a_process_is_found_once_it_was_stopped_for_long() -> None:
    now, states = 0.0, {1: STOPPED, 2: "alive"}
    stopped = StoppedProcesses(lambda: now, states.__getitem__)
    assert stopped.find_longer_than(4, [1, 2]) == []
    now, states[2] = 3.0, STOPPED
    assert stopped.find_longer_than(4, [1, 2]) == []
    now, states[1] = 5.0, "alive"
    assert stopped.find_longer_than(4, [1, 2]) == []
    now, states[1] = 7.0, STOPPED
    assert stopped.find_longer_than(4, [1, 2]) == [2]


def test_states_and_descendants_are_read() -> None:
    script = "import subprocess, sys; subprocess.run(['sleep', '100'])"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        while len(found := find_descendants(child.pid)) < 1 or process_name(found[0]) != "sleep":
            pass
        assert found[0] in find_descendants(os.getpid())
        os.kill(found[0], signal.SIGSTOP)
        while process_state(found[0]) != STOPPED:
            pass
        os.kill(found[0], signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == "gone" and process_name(child.pid) == ""
