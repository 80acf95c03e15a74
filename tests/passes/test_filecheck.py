"""Runs the `// RUN:` lines of every .mlir file: `secc opt` in this process, its output held against the
file's CHECK lines.

In a RUN line `%s` is the file; `2>&1` adds stderr to what is checked, and lets the command fail with exit
code 2; `--check-prefix NAME` after `filecheck %s` takes other lines than CHECK.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts

from secc.cli import main

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("*.mlir")), ids=lambda p: p.stem)
def test_filecheck(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [x.removeprefix("// RUN: ") for x in path.read_text().splitlines() if x.startswith("// RUN: ")]
    assert lines, f"{path.name} has no RUN line"
    for line in lines:
        command, check = line.split("|")
        words = shlex.split(command)
        assert words[0] == "secc" and check.split()[:2] == ["filecheck", "%s"], line
        printed = _printed([w.replace("%s", str(path)) for w in words[1:]], capsys)
        _check(path, printed, check.partition("--check-prefix")[2].strip(" =") or "CHECK")


def _printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    fails = "2>&1" in words
    with pytest.raises(SystemExit) as ended:
        main([w for w in words if w != "2>&1"])
    printed = capsys.readouterr()
    assert ended.value.code == (2 if fails else 0), printed.err
    return printed.out + (printed.err if fails else "")


def _check(path: Path, printed: str, prefix: str) -> None:
    options = Options(match_filename=str(path), check_prefixes=[prefix])
    with path.open() as checks:
        matcher = Matcher(
            options, FInput(path.name, printed), Parser(options, checks, *pattern_for_opts(options))
        )
        assert matcher.run() == 0, (
            f"{path.name}: the output differs from what its {prefix} lines say:\n{printed}"
        )
