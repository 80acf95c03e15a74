"""Divisors that depend on weights of the model: parameters are refused by name, buffers are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from tests.passes.loss_examples import MODEL as LOSS_MODEL

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


COUNTED = {
    "inverse": "w = 1 / torch.bincount(kinds, minlength=6)[kinds]; return (w * nll).sum() / w.sum()",
    "effective": "w = 0.1 / (1 - 0.9 ** torch.bincount(kinds, minlength=6)); return (w[kinds] * nll).mean()",
    "weight of cross_entropy": "w = len(x) / (6 * torch.bincount(kinds, minlength=6).clamp(min=1)); return"
    " F.cross_entropy(y.mean(1), kinds, weight=w)",
}


@pytest.mark.parametrize("name", COUNTED)
def test_weights_of_classes_may_come_from_how_often_these_are_in_the_batch(name: str, tmp_path: Path) -> None:
    lines = (
        "kinds = labels[:, 0].clamp(min=0); nll = F.cross_entropy(y.mean(1), kinds, reduction='none'); "
        + COUNTED[name]
    )
    (tmp_path / "counted.py").write_text(LOSS_MODEL.format(body=f"        {lines}"))
    check_exactness(compile_model(tmp_path / "counted.py", CompileOptions("local:2", 8)), required=True)
