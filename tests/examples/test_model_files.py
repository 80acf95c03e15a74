"""The model files that other tests compile are what they claim to be: plain PyTorch trains them, or says why
not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.runtime.model.user_file import extract_loss, load_model_file

GOOD = ("internvl_tiny", "llava_tiny", "qwen_distil", "two_modalities", "voxtral_tiny", "whisper_tiny")


@pytest.mark.parametrize("name", GOOD)
def test_plain_pytorch_trains_it(models: Path, name: str):
    user = load_model_file(models / f"{name}.py")
    torch.manual_seed(0)
    model = user.build_model()
    batch = user.collate([user.load_sample(i) for i in range(8)])
    loss = extract_loss(model(**batch))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert any(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "key"),
    [("llava_tiny", "pixel_values"), ("two_modalities", "images"), ("two_modalities", "audio")],
)
def test_some_samples_have_the_modality_and_some_lack_it(models: Path, name: str, key: str):
    user = load_model_file(models / f"{name}.py")
    share = sum(key in user.load_sample(i) for i in range(64)) / 64
    assert 0.25 < share < 0.75


def test_the_number_of_images_is_ragged(models: Path):
    user = load_model_file(models / "two_modalities.py")
    assert {len(user.load_sample(i).get("images", ())) for i in range(64)} == {0, 1, 2, 3}
