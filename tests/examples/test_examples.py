"""The examples' data, models and evaluations, on a small scale. That they learn what they should takes
minutes: see the slow tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from secc.runtime.model.user_file import extract_loss, load_model_file


@pytest.fixture
def example(examples: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports an example by name, with its folder on the path as when it is run, and forgets it
    afterwards."""
    monkeypatch.syspath_prepend(str(examples))
    names = [p.stem for p in examples.glob("*.py")]
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def small_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Any) -> ModuleType:
    """`distill_text` with a teacher of random weights."""
    path = tmp_path / "teacher.safetensors"
    monkeypatch.setenv("DISTILL_TEACHER", str(path))
    module = example("distill_text")
    torch.manual_seed(0)
    save_file(dict(module.teacher().named_parameters()), path)
    return module


def test_digits_train_in_plain_pytorch(examples: Path):
    user = load_model_file(examples / "vlm_digits.py")
    model = user.build_model()
    batch = user.collate([user.load_sample(i) for i in range(8)])
    extract_loss(model(**batch)).backward()
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 700_000
    assert {"input_ids", "labels", "attention_mask", "pixel_values"} == set(batch)


def test_half_of_the_digits_samples_have_an_image_and_none_is_held_out(example: Any):
    module = example("vlm_digits")
    images, _ = module.pictures()
    held_out = {image.numpy().tobytes() for image in images[:: module.HELD_OUT]}
    data = module.dataset()
    shown = [
        s["pixel_values"][0].numpy().tobytes() for s in (data[i] for i in range(400)) if "pixel_values" in s
    ]
    assert 150 < len(shown) < 250
    twins = {image.numpy().tobytes() for j, image in enumerate(images) if j % module.HELD_OUT} & held_out
    assert not (set(shown) & held_out) - twins


def test_captions_are_judged_letter_for_letter(example: Any, monkeypatch: pytest.MonkeyPatch):
    evaluation = example("eval_digits")
    values = evaluation.pictures()[1][:: evaluation.HELD_OUT]
    always_seven = [b"seven"] * len(values)
    monkeypatch.setattr(evaluation, "captions", lambda net, images: always_seven)
    assert evaluation.accuracy(torch.nn.Identity()) == pytest.approx((values == 7).float().mean().item())


def test_an_untrained_model_captions_nothing_right(example: Any, monkeypatch: pytest.MonkeyPatch):
    evaluation = example("eval_digits")
    images, values = evaluation.pictures()
    monkeypatch.setattr(evaluation, "pictures", lambda: (images[:100], values[:100]))
    torch.manual_seed(0)
    assert evaluation.accuracy(evaluation.model()) < 0.05


def test_the_teacher_is_loaded_and_frozen(small_teacher: ModuleType):
    model = small_teacher.model()
    torch.manual_seed(0)
    wanted = small_teacher.teacher()
    assert all(
        torch.equal(a, b) and not a.requires_grad
        for a, b in zip(model.teacher.parameters(), wanted.parameters(), strict=True)
    )
    assert all(p.requires_grad for p in model.student.parameters())


def test_without_a_teacher_the_message_says_how_to_train_one(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DISTILL_TEACHER", str(tmp_path / "none.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"train_teacher\.py"):
        example("distill_text").model()


def test_the_share_of_the_teacher_is_a_choice(small_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, ids = small_teacher.model(), torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        monkeypatch.setattr(small_teacher, "ALPHA", 0.0)
        alone = model(ids, ids)
        assert torch.equal(alone, model.student(input_ids=ids, labels=ids).loss)
        monkeypatch.setattr(small_teacher, "ALPHA", 1.0)
        assert not torch.equal(alone, model(ids, ids))


def test_no_held_out_paragraph_is_trained_on(small_teacher: ModuleType):
    train, held_out = (set(part.split(b"\n\n")) for part in small_teacher.manual())
    assert len(held_out) > 150 and not train & held_out


def test_an_untrained_student_knows_nothing_of_the_held_out_text(
    small_teacher: ModuleType, example: Any, monkeypatch: pytest.MonkeyPatch
):
    train, held_out = small_teacher.manual()
    evaluation = example("eval_distill")
    monkeypatch.setattr(evaluation, "manual", lambda: (train, held_out[:4096]))
    torch.manual_seed(0)
    assert 5 < evaluation.held_out_loss(small_teacher.qwen(small_teacher.WIDTH)) < 7
