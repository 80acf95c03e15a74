"""Layers of a user's small model stand for large ones, if it takes the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.tp_search.small_model_layers import SmallModelLayers
from secc.runtime.model.user_file import load_model_file

FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.layer = width, nn.Sequential(nn.Linear({taken}, width))

    def forward(self, x):
        return self.layer(x).sum()

def model():
    return Model(64)

def small_model():
    return Model(4)

def dataset():
    return [{{"x": torch.ones(8)}}] * 4
"""


@pytest.mark.parametrize(("taken", "found"), [(8, True), (5, False)])
def test_a_small_model_that_refuses_the_samples_has_no_layers(
    tmp_path: Path, taken: int, found: bool
) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE.format(taken=taken))
    user = load_model_file(path)
    layers = SmallModelLayers(user, survey_dataset(user, 4))
    assert (layers.find_like(nn.Sequential(nn.Linear(8, 64))) is not None) == found


SMALL_SAMPLES = """
def small_dataset():
    return [{"KEY": torch.ones(5)}] * 4
"""


@pytest.mark.parametrize(("key", "found"), [("x", True), ("y", False)], ids=["same keys", "other keys"])
def test_a_small_model_runs_on_small_samples_that_have_the_keys_of_the_dataset(
    tmp_path: Path, key: str, found: bool
) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE.format(taken=5) + SMALL_SAMPLES.replace("KEY", key))
    user = load_model_file(path)
    layers = SmallModelLayers(user, survey_dataset(user, 4))
    assert (layers.find_like(nn.Sequential(nn.Linear(8, 64))) is not None) == found
