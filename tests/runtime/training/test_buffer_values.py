"""Class weights in a buffer: a plan contains their values, and a run rejects a model with other values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import load_model_file
from secc.runtime.training.rank_context import check_loss_buffers
from tests.e2e.harness import compile_and_write

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))

    def forward(self, x, label):
        return self.criterion(self.head(x), label)


def model():
    return Model()


def dataset():
    return [dict(x=torch.randn(4), label=torch.tensor(i % 3)) for i in range(12)]
"""


def test_class_weights_are_exact_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    compiled = compile_and_write(path, tmp_path / "plan")  # raises where the plan is not exact
    assert [p["exact"] for p in compiled.plan.checks["patterns"]] == [True]
    text = (tmp_path / "plan/sections/terms.py").read_text()
    assert 'BUFFERS = ("buffer:criterion.weight",)' in text

    kept = torch.load(tmp_path / "plan/sections/constants.pt")
    terms = SimpleNamespace(BUFFERS=tuple(kept), constants=lambda name, device: kept[name])
    model = load_model_file(path).build_model()
    check_loss_buffers(terms, model)  # type: ignore[arg-type]
    model.criterion.weight *= 2  # type: ignore[union-attr, operator]
    with pytest.raises(
        UserError, match=r"the buffer criterion\.weight, by which the loss is weighted, has other values"
    ):
        check_loss_buffers(terms, model)  # type: ignore[arg-type]
