"""The reference workloads' data: packed batches whose sizes `sizes(i)` tells, and features for every
placeholder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.runtime.model.user_file import UserModel, load_model_file

FOLDER = Path(__file__).parents[2] / "tools" / "workloads"
FILES = sorted(FOLDER.glob("*.py"))
IMAGE, AUDIO = 1, 2


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def user(request: pytest.FixtureRequest) -> UserModel:
    return load_model_file(request.param)


def test_all_are_found() -> None:
    assert len(FILES) == 19


def test_sizes_are_told_without_loading(user: UserModel) -> None:
    data = user.module.dataset()
    for i in range(12):
        assert user.declared_sizes(i) == {key: len(value) for key, value in data[i].items()}


def test_samples_are_packed_or_padded(user: UserModel) -> None:
    data = user.module.dataset()
    samples = [data[i] for i in range(12)]
    batch = user.collate(samples)
    if "lengths" not in batch:  # long texts are padded
        assert batch["labels"].shape == (12, max(len(s["labels"]) for s in samples))
        return
    assert (
        batch["input_ids"].shape
        == batch["labels"].shape
        == batch["position_ids"].shape
        == (1, int(batch["lengths"].sum()))
    )
    assert batch["lengths"].tolist() == [len(s["input_ids"]) for s in samples]


def test_every_placeholder_has_a_feature(user: UserModel) -> None:
    data = user.module.dataset()
    for sample in (data[i] for i in range(30)):
        counts = {i: int((sample["input_ids"] == i).sum()) for i in (IMAGE, AUDIO)}
        assert counts[AUDIO] == int(sample.get("audio_mask", torch.zeros(1)).sum())
        if (images := sample.get("pixel_values")) is not None:
            per_row = 1 if images.ndim == 3 else {336: 576, 448: 256}[images.shape[-1]]
            assert counts[IMAGE] == per_row * len(images)


@pytest.mark.slow
def test_small_ones_are_exact(user: UserModel) -> None:
    """Each within a minute of one core."""
    compiled = compile_model(
        user.path, CompileOptions(cluster="local:2", global_batch=16, stats_samples=64, small=True)
    )
    patterns = check_exactness(compiled, required=True).plan.checks["patterns"]
    assert patterns and all(p["exact"] for p in patterns)


def test_labels_are_the_next_words(user: UserModel) -> None:
    sample = next(s for s in (user.module.dataset()[i] for i in range(50)) if len(s["input_ids"]) > 8)
    ids, labels = sample["input_ids"], sample["labels"]
    counted = labels[:-1] != -100
    assert counted.any() and torch.equal(ids[1:][counted], labels[:-1][counted])
