"""Divisors that depend on weights of the model: parameters are refused by name, buffers are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        DECLARE

    def forward(self, tokens, source):
        logits = self.head(self.embed(tokens))[:, :-1].transpose(1, 2)
        nll = F.cross_entropy(logits, tokens[:, 1:], reduction="none")
        weight = (tokens[:, 1:] != 0) * self.weights[source][:, None]
        return (nll * weight).sum() / weight.sum()


def model():
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [
        {"tokens": torch.randint(1, 20, (5 + i % 4,), generator=g), "source": torch.tensor(i % 3)}
        for i in range(24)
    ]
"""
PARAMETER = "self.weights = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]), requires_grad=False)"
BUFFER = 'self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))'
OPTIONS = CompileOptions(cluster="local:2", global_batch=8)


def test_a_divisor_of_a_parameter_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("DECLARE", PARAMETER))
    with pytest.raises(UserError, match="that depends on the parameter weights") as refused:
        compile_model(tmp_path / "net.py", OPTIONS)
    assert refused.value.where == "net.py:17" and "buffer" in refused.value.remedy


def test_a_divisor_of_a_buffer_is_exact(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("DECLARE", BUFFER))
    assert check_exactness(compile_model(tmp_path / "net.py", OPTIONS), required=True).plan.checks["patterns"]
