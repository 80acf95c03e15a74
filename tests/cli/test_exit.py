"""A command ends its process immediately, with complete output, its exit code, and exit functions called."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
