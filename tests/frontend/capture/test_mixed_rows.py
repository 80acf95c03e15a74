"""Statements that are a block because captures of several batches differ may mix samples, at one number of
them only: they are compared with samples alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, axis):
        y = {statement}
        return y.square().sum()


def model():
    return Scaled()


def dataset():
    draw = torch.Generator().manual_seed(0)
    return [dict(x=torch.randn(3, generator=draw), axis=torch.randn(3, generator=draw)) for _ in range(24)]
"""
OPTIONS = CompileOptions(cluster="local:1", global_batch=7)


@pytest.mark.parametrize(
    "statement, why",
    [
        # As `torch.cross` without a dim: along the first one with three entries.
        (
            "torch.linalg.cross(x * self.scale, axis, dim=list(x.shape).index(3))",
            r"line_12 couples .* a sample gives another result when other samples come with it \(among 3",
        ),
        ("(x * self.scale).chunk(5)[0]", r"line_12 returns .* rows for B samples, to which .* do not add up"),
        ("(x * self.scale).unsafe_chunk(4)[0]", "rows for B samples, to which .* do not add up"),
        # Each sample with each later one.
        (
            "(x * self.scale)[[i for i in range(len(x)) for _ in range(i)]]",
            "rows for B samples, to which .* do not add up",
        ),
    ],
)
def test_a_statement_that_mixes_samples_is_refused_and_exact_on_the_whole_batch(
    statement: str, why: str, tmp_path: Path
) -> None:
    model = tmp_path / "scaled.py"
    model.write_text(MODEL.format(statement=statement))
    with pytest.raises(UserError, match=f"not separable by sample: .*{why}") as refused:
        compile_model(model, OPTIONS)
    assert refused.value.where == "scaled.py:12" and "--whole-batch line_12" in refused.value.remedy
    check_exactness(compile_model(model, replace(OPTIONS, whole_batch=("line_12",))), required=True)


@pytest.mark.parametrize(
    "statement",
    [
        "(x * self.scale) * (1 if len(x) in (2, 3, 5) else 1.0)",
        "torch.roll(x * self.scale, len(x) ** 4 % 5, 0)",  # only the samples' order depends on their number
    ],
)
def test_a_statement_that_keeps_samples_apart_is_a_block(statement: str, tmp_path: Path) -> None:
    model = tmp_path / "scaled.py"
    model.write_text(MODEL.format(statement=statement))
    plan = check_exactness(compile_model(model, OPTIONS), required=True).plan
    assert [(s.blocks, s.whole_batch) for s in plan.sections] == [(("line_12",), False)]
