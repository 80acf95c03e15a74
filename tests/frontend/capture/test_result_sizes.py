"""Sizes of blocks' results that values decide are found where captures saw one number only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
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


RECURRENT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(4, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True)

    def forward(self, x, lengths):
        x = self.conv(F.relu(self.conv.bias[:4, None] + x.transpose(1, 2))).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=TRUE)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 8)

    def forward(self, x, lengths):
        out = self.head(self.encoder(x, lengths))
        inside = torch.arange(out.shape[1]) < lengths[:, None]
        return (out.square().mean(-1) * inside).sum() / len(x)


def model():
    return Net()


def dataset():
    return [{"x": torch.randn(3 + i * 5 % 7, 4)} for i in range(16)]


def collate(samples):
    rows = [s["x"] for s in samples]
    return {"x": pad_sequence(rows, batch_first=True), "lengths": torch.tensor([len(r) for r in rows])}
"""


def test_a_result_as_long_as_the_longest_sample_is_named_at_padded_widths(tmp_path: Path) -> None:
    """Padding reaches the loss through the convolution, so micro-batches are padded to the global width."""
    (tmp_path / "net.py").write_text(RECURRENT.replace("=TRUE", "=True"))
    options = CompileOptions(cluster="local:1", global_batch=4)
    with pytest.raises(UserError, match=r"encoder \(Encoder\) returns as much as the longest") as error:
        check_exactness(compile_model(tmp_path / "net.py", options))
    assert error.value.where == "net.py:13" and "total_length" in (error.value.remedy or "")
    (tmp_path / "net.py").write_text(RECURRENT.replace("=TRUE", "=True, total_length=x.shape[1]"))
    assert check_exactness(compile_model(tmp_path / "net.py", options)).plan.checks["patterns"]
