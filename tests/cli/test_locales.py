"""Commands work in a locale that has ASCII only: files are UTF-8, and the terminal shows question marks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODEL = """
import torch
from torch import nn
class Größe(nn.Module):  # × → ·
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x).square().mean()
def model(): return Größe()
def dataset(): return [{"x": torch.full((4,), float(i))} for i in range(8)]
"""


def test_a_model_with_other_characters_is_compiled_and_explained(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from secc.cli import main; main()", *command],
            env=os.environ
            | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.getcwd()},
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode("ascii")

    compiled = run("compile", "model.py", "--cluster", "local:2", "-o", "plan")
    assert "shown to be exact" in compiled and "secc explain plan ? secc simulate" in compiled
    assert "exact" in run("explain", "plan")
    assert (tmp_path / "plan/model.py.txt").read_text(encoding="utf-8") == MODEL
    run("compile", "model.py", "--cluster", "local:1", "-o", "plan")  # reads the old plan's files
    run("report", "plan", "-o", "report.html")
    assert not (tmp_path / "report.html").read_text(encoding="utf-8").isascii()
