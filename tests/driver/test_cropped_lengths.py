"""Samples that captures shorten, although another input holds their length."""

from __future__ import annotations

from pathlib import Path

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness

MODEL = """
import torch
from torch import nn


class Last(nn.Module):
    def forward(self, hidden, lengths):
        return hidden[torch.arange(len(lengths)), lengths - 1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.last, self.head = nn.Embedding(9, 4), Last(), nn.Linear(4, 1)

    def forward(self, ids, lengths):
        return self.head(self.last(self.embed(ids), lengths)).square().mean()


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    return [{"ids": torch.arange(1, 7 + i % 2), "lengths": torch.tensor(6 + i % 2)} for i in range(12)]
"""


def test_a_length_that_contradicts_shortened_samples_is_no_fault_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    options = CompileOptions(cluster="local:1", global_batch=4)
    compiled = check_exactness(compile_model(tmp_path / "model.py", options))
    assert compiled.survey.has_crops
    assert all(p["exact"] for p in compiled.plan.checks["patterns"])  # pyright: ignore


STACKING = """

def collate(samples):
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def dataset():
    return [{"ids": torch.arange(1, 7) + i % 3, "lengths": torch.tensor(6)} for i in range(12)]
"""


def test_a_collate_that_stacks_vectors_of_one_length_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL + STACKING)
    options = CompileOptions(cluster="local:1", global_batch=4)
    compiled = check_exactness(compile_model(tmp_path / "model.py", options))
    assert not compiled.survey.has_crops
    assert all(p["exact"] for p in compiled.plan.checks["patterns"])  # pyright: ignore
