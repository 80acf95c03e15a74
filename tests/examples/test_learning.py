"""The examples learn what they promise when secc trains them with their sections on ranks of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(3600)]


class Shell:
    """Runs scripts of the examples and commands of secc with `environment` on top of this process's."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root, self.environment = root, environment

    def script(self, name: str, *arguments: object) -> str:
        return self._python(str(self.root / "examples" / name), *arguments)

    def secc(self, *arguments: object) -> str:
        return self._python("-c", "from secc.cli import main; main()", *arguments)

    def _python(self, *arguments: object) -> str:
        command = [sys.executable, *map(str, arguments)]
        result = subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=1700
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def train(self, example: str, folder: Path, global_batch: int, steps: int) -> Path:
        """The weights of an example after `steps` steps, its two sections apart on three ranks."""
        plan, weights = folder / "plan", folder / "weights.safetensors"
        choices = ["--cluster", "local:3", "--strategy", "apart", "--global-batch", global_batch]
        self.secc("compile", self.root / "examples" / example, "-o", plan, *choices)
        self.secc("run", plan, "--steps", steps, "--clip", 1, "--save", folder / "checkpoints")
        self.secc("export", folder / "checkpoints", "-o", weights)
        return weights


@pytest.fixture
def shell(root: Path, tmp_path: Path) -> Shell:
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Shell(
        root, os.environ | {"PYTHONPATH": path, "DISTILL_TEACHER": str(tmp_path / "teacher.safetensors")}
    )


def number(text: str) -> float:
    """The last number of an evaluation's output."""
    return float(re.findall(r"\d+\.\d+", text)[-1])


def test_held_out_digits_are_captioned(shell: Shell, tmp_path: Path):
    weights = shell.train("vlm_digits.py", tmp_path, global_batch=32, steps=400)
    assert number(shell.script("eval_digits.py", weights)) >= 85


def test_a_teacher_helps_its_student(shell: Shell, tmp_path: Path):
    shell.script("train_teacher.py", "--steps", 400)
    losses: dict[str, float] = {}
    for alpha in ("0", "0.5"):
        shell.environment["DISTILL_ALPHA"] = alpha
        weights = shell.train("distill_text.py", tmp_path / alpha, global_batch=16, steps=400)
        losses[alpha] = number(shell.script("eval_distill.py", weights))
    assert losses["0.5"] < losses["0"]
