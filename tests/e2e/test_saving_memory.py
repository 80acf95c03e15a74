"""Plans that shard optimizer states and recompute train as plain PyTorch does, with Hugging Face's models, caches and all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import compile_to, differences, distributed, plain, recording_model

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 5, 12

CASES = [
    ("llava_tiny", ("language_model.sharding=zero1", "language_model.recompute=selective", "vision_tower.recompute=full")),
    ("qwen_distil", ("student.sharding=zero2", "student.recompute=full", "student.dp=2")),
    ("qwen_distil", ("student.sharding=zero3", "student.recompute=selective", "student.dp=2", "teacher.sharding=zero3", "teacher.dp=2")),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "choices"), CASES)
def test_plan_trains_as_plain_pytorch(name: str, choices: tuple[str, ...], tmp_path: Path) -> None:
    model = recording_model(name, tmp_path, MODELS)
    reference = plain(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compiled = compile_to(model, tmp_path / "plan", cluster="local:3", global_batch=GLOBAL_BATCH, set=choices)
    for choice in choices:
        section, _, text = choice.rpartition(".")
        key, _, value = text.partition("=")
        assert key == "dp" or getattr(compiled.plan.section(section), key) == value
    found = distributed(tmp_path / "plan", compiled.plan.world_size, STEPS, tmp_path / "run")
    assert list(differences(found, reference)) == []
