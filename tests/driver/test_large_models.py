"""Model files with a model that is too large to be built here: `small_model()` stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import secc
from secc.driver import compile as compiler
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width, words=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, input_ids, labels):
        scores = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def model():
    return Net(64)


def small_model():
    return Net(8)


def dataset():
    rows = [torch.arange(1, 9 + i % 5) for i in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]
"""
BYTES = 4 * (64 * 64 + 64 * 65) - 1  # fewer than model() has, more than small_model()


def write(folder: Path, text: str = MODEL) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("largest", "checked"), [(BYTES, "small_model()"), (BYTES + 1, "model()")])
def test_a_check_takes_the_small_model_if_the_model_is_too_large(
    largest: int, checked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", largest)
    check = secc.check(write(tmp_path))
    assert check.is_exact and check.checked == checked
    assert ("checked" in dict(check.facts)) == (checked == "small_model()")


def test_a_check_of_a_large_model_without_a_small_one_says_what_to_define(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", 0)
    with pytest.raises(UserError, match="too large to be shown exact here") as error:
        secc.check(write(tmp_path, MODEL.replace("small_model", "other_model")))
    assert "define small_model()" in error.value.remedy


def test_a_check_asks_for_no_memory_of_devices(tmp_path: Path) -> None:
    """Nothing runs on them."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: 1\ndevices: 2\nkind: tiny\nlike: cpu\nmemory_gib: 0.001\n")
    path = write(tmp_path, MODEL.replace("Net(64)", "Net(512, 1024)"))
    with pytest.raises(UserError, match="does not fit"):
        compile_model(path, CompileOptions(str(cluster), 8))
    compile_model(path, CompileOptions(str(cluster), 8, compared_only=True))


@pytest.mark.parametrize(
    ("words", "note"), [("64", ""), ("4", "small_model() shows nothing about model(): forward fails in")]
)
def test_a_small_model_that_fails_is_named(
    words: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", 0)
    path = write(tmp_path, MODEL.replace("Net(8)", f"Net(8, {words})"))
    checks = compile_model(path, CompileOptions(cluster="2xH100")).plan.checks
    assert ("IndexError" in str(checks.get("notes"))) == bool(note)
    assert note in str(checks.get("notes"))


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_an_error_that_the_small_model_shares_is_not_blamed_on_the_dtype(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", 0)
    text = MODEL.replace("labels.flatten(),", "labels.flatten()[1:],")
    with pytest.raises(UserError, match="forward fails in plain PyTorch too, on the first samples"):
        compile_model(write(tmp_path, text), CompileOptions(cluster="2xH100", dtype=dtype))


def test_a_sample_that_fails_in_every_batch_is_not_blamed_on_the_size_of_the_batch(tmp_path: Path) -> None:
    places = "self.embed.weight[:11][: input_ids.shape[1]]"  # of samples up to 11 tokens; some have 12
    text = MODEL.replace("self.embed(input_ids)", f"self.embed(input_ids) + {places}")
    with pytest.raises(UserError, match="on one of the samples") as error:
        compile_model(write(tmp_path, text), CompileOptions(cluster="local:2"))
    assert "a norm over one value" not in error.value.remedy
