"""Towers that stay whole when they are opened are known before stages are chosen for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.frontend.capture import whole_blocks
from secc.frontend.capture.capture import capture_model
from secc.frontend.capture.whole_blocks import blocks_left_whole, find_whole_blocks
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import load_model_file

# `ragged` adds once for each unit of a sum over the samples, which it also tells its layers; `even` does the
# same in every batch.
MODEL = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, number):
        return x + self.inner(x) * number


class Tower(nn.Module):
    def __init__(self, is_ragged):
        super().__init__()
        self.is_ragged = is_ragged
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x, marks):
        number = int(marks.square().sum()) % 7 if self.is_ragged else 2
        for _ in range(number):
            x = x + 1
        for layer in self.layers:
            x = layer(x, number)
        return x


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.even, self.ragged = Tower(False), Tower(True)

    def forward(self, tokens, marks):
        x = self.embed(tokens)
        return (self.even(x, marks) + self.ragged(x, marks)).square().mean()


def model():
    return Towers()


def dataset():
    return [
        {"tokens": torch.arange(3 + i % 5), "marks": torch.tensor(i * i % 11)} for i in range(40)
    ]
"""


def test_only_blocks_with_glue_that_changes_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "towers.py").write_text(MODEL)
    user = load_model_file(path)
    meta, drawn = build_meta_model(user), survey_dataset(user)
    inputs = describe_inputs(user, drawn)
    before = capture_model(user, meta, drawn, inputs)
    tried: list[list[str]] = []
    monkeypatch.setattr(
        whole_blocks,
        "capture_model",
        lambda *args, before: tried.append(args[4]) or capture_model(*args, before=before),
    )
    found = find_whole_blocks(user, meta, drawn, inputs, before)
    assert tried == [["ragged"]]
    assert list(found) == ["ragged"] and "one block" in found["ragged"].reason
    # The whole capture, which stages need, says the same of both.
    opened = capture_model(user, meta, drawn, inputs, ["even", "ragged"], before=before)
    assert [block for block, _ in blocks_left_whole(["even", "ragged"], opened)] == ["ragged"]
