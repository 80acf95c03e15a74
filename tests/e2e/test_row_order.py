"""Rows of concatenated batches (`cat([chosen, rejected])`) do not lie sample after sample, so section
edges do not carry them as such."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from tools.zoo import EXACT, look
from tools.zoo_models import entry

MODEL = """
import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, first, second):
        return self.layers(JOINED)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = Tower().requires_grad_(False), Tower()

    def forward(self, first, second):
        with torch.no_grad():
            taught = self.teacher(first, second)
        return (self.student(first, second) - taught).square().sum(-1).mean()


def model():
    return Model()


def dataset():
    made = (torch.Generator().manual_seed(i) for i in range(40))
    return [{"first": torch.randn(8, generator=g), "second": torch.randn(8, generator=g)} for g in made]
"""


def compiled(tmp_path: Path, joined: str = "torch.cat([first, second])") -> CompiledPlan:
    (tmp_path / "model.py").write_text(MODEL.replace("JOINED", joined))
    return compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))


def test_stacked_halves_of_a_batch_can_cross_sections() -> None:
    row = look(entry("two_views"), run=False)
    assert row.check == EXACT
    assert row.sections == {"teacher": "forward", "student": "train"}


def test_rows_reordered_by_a_block_are_detected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="or rows in another order") as refused:
        check_exactness(compiled(tmp_path), required=True)
    assert "--whole-batch teacher --whole-batch student" in refused.value.remedy
    assert check_exactness(
        compiled(tmp_path, joined="torch.stack([first, second], 1).flatten(0, 1)"), required=True
    )
