"""`secc --version` prints the version of the package."""

from __future__ import annotations

import pytest

import secc
from secc.cli import main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code in (None, 0)
    assert capsys.readouterr().out == f"secc {secc.__version__}\n"
