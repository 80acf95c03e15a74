"""Sections in pipeline stages train exactly what plain PyTorch trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.harness import compile_to, differences, distributed, plain, recording_model

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 4, 12

# (model file, ranks, choices)
CASES = [
    ("qwen_distil", 2, ("student.pp=2", "teacher.with=student")),
    ("llava_tiny", 3, ("language_model.pp=2",)),
]  # fmt: skip
SLOW = [
    ("qwen_distil", 4, ("student.pp=2", "teacher.pp=2")),
    ("qwen_distil", 5, ("student.pp=2", "teacher.pp=3")),
]  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "ranks", "choices"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW])
def test_stages_train_as_plain_pytorch(name: str, ranks: int, choices: tuple[str, ...], tmp_path: Path) -> None:
    model = recording_model(name, tmp_path, MODELS)
    reference = plain(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compile_to(model, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=choices)
    sections = json.loads((tmp_path / "plan" / "plan.json").read_text())["sections"]
    for section, pp in ((choice.partition(".pp=")[0], choice.partition(".pp=")[2]) for choice in choices if ".pp=" in choice):
        assert (sections[section]["mesh"]["pp"], len(sections[section]["stages"])) == (int(pp), int(pp))
    assert list(differences(distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run"), reference)) == []
