"""Training a plan computes what plain PyTorch computes: every step's loss, the first step's gradients, the parameters after five steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.frontend.reference import GRADIENT_FLOOR, GRADIENT_TOLERANCE, LOSS_TOLERANCE
from tests.e2e.harness import LEARNING_RATE, Trained, compile_to, distributed, plain, recording_model

MODELS = Path(__file__).parent.parent / "models"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, GLOBAL_BATCH = 5, 12
NOISE = 1e-6  # an entry below this share of all gradients (a key's bias) is rounding noise, which AdamW turns into steps of any sign

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
    assert_same_losses(found, reference)
    assert_same_gradients(found, reference)
    assert_same_parameters(found, reference)


def assert_same_losses(found: Trained, reference: Trained) -> None:
    assert len(found.losses) == len(reference.losses)
    assert found.losses[0] == pytest.approx(reference.losses[0], rel=LOSS_TOLERANCE)
    assert found.losses == pytest.approx(reference.losses, rel=1e-4)


def assert_same_gradients(found: Trained, reference: Trained) -> None:
    assert found.gradients.keys() >= reference.gradients.keys()
    total = _global_norm(reference)
    for name, expected in reference.gradients.items():
        got = found.gradients[name]
        if expected is None or got is None:
            assert got is expected, f"{name}: no gradient on one side only"
            continue
        assert (got - expected).norm() <= GRADIENT_TOLERANCE * expected.norm() + GRADIENT_FLOOR * total, name


def assert_same_parameters(found: Trained, reference: Trained) -> None:
    total = _global_norm(reference)
    for name, expected in reference.parameters.items():
        difference = (found.parameters[name] - expected).abs()
        gradient = reference.gradients.get(name)
        noise = torch.ones_like(difference, dtype=torch.bool) if gradient is None else gradient.abs() < NOISE * total
        assert (difference <= torch.where(noise, 2 * STEPS * LEARNING_RATE, 1e-4)).all(), name


def _global_norm(reference: Trained) -> torch.Tensor:
    return torch.stack([g.norm() for g in reference.gradients.values() if g is not None]).norm()
