"""Standard streams of runs: full disks and closed descriptors end nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from secc.runtime.host.output_streams import drop_unwritable_output, open_closed_streams
open_closed_streams()
drop_unwritable_output(("stdout", "stderr"))
for stream in (sys.stdout, sys.stderr):
    print("é\\udc80 lost or not" * 10_000, file=stream, flush=True)
file = os.open("/dev/null", os.O_RDONLY)
os._exit(5 if file > 2 else 6)
"""


@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_output_that_cannot_be_written_is_dropped(redirection: str) -> None:
    command = f'set -o pipefail; "$0" -c "$1" {redirection}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, SCRIPT],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 5 and not done.stderr


def test_output_that_can_be_written_arrives() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 5
    assert done.stdout == done.stderr == "é\\udc80 lost or not".encode() * 10_000 + b"\n"
