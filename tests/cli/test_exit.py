"""A command's process: it ends immediately, with complete output, its exit code, and exit functions called;
its threads sleep while they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from secc.cli import main

PROGRAM = "import atexit; atexit.register(print, 'last words'); from secc.cli import main; main()"


@pytest.mark.parametrize(
    ("arguments", "code", "said", "complaint"),
    [
        (["opt", "--help"], 0, "Usage", ""),
        (["opt", "none.mlir"], 2, "", "cannot read the file"),
        (["opt", "--none"], 2, "", "No such option"),
    ],
)
def test_process_ends_with_its_command(arguments: list[str], code: int, said: str, complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout and done.stdout.endswith("last words\n")
    assert complaint in done.stderr


@pytest.mark.parametrize("chosen", [None, "ACTIVE"])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen or "")  # so that it is put back afterwards
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == (chosen or "PASSIVE")
