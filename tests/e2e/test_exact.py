"""Training a plan computes what plain PyTorch computes: every step's loss, the first step's gradients, the parameters after five steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import compile_to, differences, distributed, plain, recording_model

MODELS = Path(__file__).parent.parent / "models"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, GLOBAL_BATCH = 5, 12

CASES = [
    ("llava_tiny", 2), ("llava_tiny", 3), ("two_modalities", 3), ("two_modalities", 4), ("qwen_distil", 2), ("qwen_distil", 4),
    ("whisper_tiny", 2), ("internvl_tiny", 3),
]  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_plan_trains_as_plain_pytorch(name: str, ranks: int, tmp_path: Path) -> None:
    model = recording_model(name, tmp_path, MODELS)
    reference = plain(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compile_to(model, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH)
    found = distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run")
    assert list(differences(found, reference)) == []
