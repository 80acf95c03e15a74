"""Sizes of blocks' results that values decide are found where captures saw one number only."""

from __future__ import annotations

from pathlib import Path

import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.frontend.capture.result_sizes import find_size_of_values

MODEL = """
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, x):
        return {"points": self.score(x[:, x.abs().sum((0, 2)) > 0])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.detector = Detector()

    def forward(self, x):
        return self.detector(x)["points"].square().sum()


def model():
    return Net()


def dataset():
    return [{"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(i))} for i in range(8)]
"""


def test_a_number_of_rows_that_values_decide_is_found(tmp_path: Path) -> None:
    """As keypoints of an image, padded to the most of a batch: all recorded batches have six of them."""
    (tmp_path / "net.py").write_text(MODEL)
    compiled = compile_model(tmp_path / "net.py", CompileOptions(cluster="local:1", global_batch=4))
    assert compiled.model is not None
    known = (compiled.user, compiled.model, compiled.captured_model.capture, compiled.plan.symbols)
    full, hidden = compiled.user.load_sample(0), {"x": torch.randn(6, 4) * (torch.arange(6) < 4)[:, None]}
    assert find_size_of_values(*known, [[full], [full, hidden]]) is None
    fault = find_size_of_values(*known, [[full, hidden], [hidden]])
    assert fault is not None and fault.where and fault.where.startswith("net.py:")
    assert "what detector returns depends on values" in fault.message
    assert "dim 1 of ['points'] has 4 entries where 6" in fault.message
