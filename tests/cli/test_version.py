"""`secc --version` prints the version of the package, and shells complete what is typed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import secc
from secc.cli import main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code in (None, 0)
    assert capsys.readouterr().out == f"secc {secc.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"), [("secc ex", ["explain", "export"]), ("secc run --ste", ["--steps"])]
)
def test_shells_complete_commands_and_options(typed: str, offered: list[str]) -> None:
    """As the script of `secc --show-completion` asks for them."""
    asked = {"_SECC_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    found = subprocess.run(
        [sys.executable, "-m", "secc"], env=os.environ | asked, capture_output=True, text=True, timeout=100
    )
    assert found.stdout.split() == offered, found.stderr
