"""Operators of PyTorch that are wrong for batches of one sample, and modules that make a little of one sample
depend on others, are named, and no plan is blamed for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from secc.driver.batch_of_one import find_coupling_module
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import refuse_faults_of_one
from secc.errors import UserError
from secc.runtime.model.user_file import load_model_file
from secc.runtime.training.one_rank_plan import OneRankPlan

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm2d(8).eval(), nn.Parameter(torch.ones(16, 8))
        self.large = nn.Parameter(torch.ones(()))

    def forward(self, x):
        scores = self.norm(x).flatten(2).transpose(1, 2) * self.scale
        return SHARE * scores.square().mean() + self.large.square()


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, 4, 4, generator=g)} for _ in range(7)]
"""


SMALL_SHARE = 1e-7  # of a loss term, with a gradient of less than 100 tolerances


def batch_norm_is_wrong_for_one_sample() -> bool:
    """Whether this PyTorch sums the gradient of a batch norm in eval mode wrongly for one sample."""
    norm, gradient = nn.BatchNorm2d(8).eval(), torch.randn(1, 16, 8)
    norm(torch.randn(1, 8, 4, 4)).flatten(2).transpose(1, 2).backward(gradient)
    assert norm.bias.grad is not None
    return not torch.allclose(norm.bias.grad, gradient.sum((0, 1)), atol=1e-4)


@pytest.mark.skipif(not batch_norm_is_wrong_for_one_sample(), reason="this PyTorch computes it correctly")
@pytest.mark.parametrize("share", [1.0, SMALL_SHARE])
def test_a_wrong_gradient_of_one_sample_is_blamed_on_its_operator(share: float, tmp_path: Path) -> None:
    """Also if it is small next to other gradients: float64 shows that it is no rounding."""
    (tmp_path / "model.py").write_text(MODEL.replace("SHARE", str(share)))
    compiled = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:1", global_batch=4))
    assert compiled.model is not None
    compiled.write_sections(tmp_path / "plan")
    rank = OneRankPlan(compiled.plan, tmp_path / "plan", compiled.user, compiled.model)
    samples = [compiled.user.dataset()[0]]
    with pytest.raises(UserError, match="another gradient than twice in one batch") as error:
        refuse_faults_of_one(compiled, rank, samples, rank.run_reference(samples))
    assert "norm" in error.value.message and "batches of one" in error.value.remedy
    assert error.value.where == "model.py:12"
    assert ("in float64, too" in error.value.message) == (share == SMALL_SHARE)


COUPLED = """
import torch
from torch import nn


class Positions(nn.Module):
    def forward(self, x):
        return x + OFFSET


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.positions, self.last = nn.Linear(8, 8), Positions(), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.positions(self.first(x))).square().mean()


def model():
    return Net()


def dataset():
    return [{"x": torch.randn(8)} for _ in range(7)]
"""


@pytest.mark.parametrize(
    ("offset", "found"), [("1e-8 * torch.arange(len(x))[:, None]", "positions"), ("1e-8 * x", "")]
)
def test_a_module_that_numbers_samples_of_a_batch_is_found(offset: str, found: str, tmp_path: Path) -> None:
    """As positions that count the images of all samples: float32 hides the difference in the loss."""
    (tmp_path / "model.py").write_text(COUPLED.replace("OFFSET", offset))
    user = load_model_file(tmp_path / "model.py")
    assert find_coupling_module(user, user.build_model(), user.load_sample(0)) == found
