"""Operators of PyTorch that are wrong for batches of one sample, and modules that make a little of one sample
depend on others, are named, and no plan is blamed for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from secc.driver import exactness_check
from secc.driver.batch_of_one import find_coupling_module, find_fault_of_one
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness, refuse_faults_of_one
from secc.errors import UserError
from secc.frontend.capture.batch_decisions import BatchDecisions, DecisionCause
from secc.runtime.model.user_file import load_model_file
from secc.runtime.training.eager_reference import ResultDifference
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


def test_a_plan_computes_it_correctly(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("SHARE", "1.0"))
    options = CompileOptions(cluster="local:1", global_batch=4, set=("model.micro_batch=1",))
    plan = check_exactness(compile_model(tmp_path / "model.py", options), required=True).plan
    assert plan.sections[0].micro_batch == 1


HOOKED = """
import torch
from torch import nn


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * len(gradient)


def divide_by_norm(hidden):
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / gradient.norm())
    return hidden


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(THROUGH(self.first(x))).square().mean()


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    return [{"x": torch.randn(8)} for _ in range(7)]
"""


@pytest.mark.parametrize(("through", "line"), [("Times.apply", 11), ("divide_by_norm", 27)])
def test_a_backward_that_computes_with_the_batch_is_named(through: str, line: int, tmp_path: Path) -> None:
    """No operator is blamed for gradients that differ between batches of two and of three samples, too."""
    (tmp_path / "model.py").write_text(HOOKED.replace("THROUGH", through))
    user = load_model_file(tmp_path / "model.py")
    error = find_fault_of_one(user, user.build_model(), [user.load_sample(0)])
    assert error is not None
    assert "a backward computes with the batch" in error.message and "register_hook" in error.remedy
    assert ("that of Times" in error.message) == (through == "Times.apply")
    assert error.where == f"model.py:{line}" and "--whole-batch" in error.remedy


@pytest.mark.parametrize(("off", "remedy"), [(1e4, "is wrong for batches of one"), (10.0, "in float64, too")])
def test_a_block_that_reads_values_is_not_blamed_for_it(
    off: float, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sample twice in a batch has another loss than alone, its gradients in twos show the fault."""

    def decided(_: BatchDecisions, pattern: frozenset[str]) -> Iterator[tuple[DecisionCause, str, object]]:
        yield DecisionCause.BLOCK_RESULT, "model.py:1", compiled.survey.compose_batches(pattern)[-1]

    def compare(samples: object, most: int, reference: object) -> Any:
        found = ResultDifference(0.0, off if most == 1 else 0.1, "norm.bias")
        return SimpleNamespace(difference=found, is_exact=most > 1)

    (tmp_path / "model.py").write_text(MODEL.replace("SHARE", "1.0"))
    monkeypatch.setattr(exactness_check, "refuse_faults_of_one", lambda *_: None)
    monkeypatch.setattr(exactness_check, "_run_reference", lambda *_: None)
    monkeypatch.setattr(BatchDecisions, "find_differing_batches", decided)
    compiled = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:1", global_batch=4))
    rank: Any = SimpleNamespace(sections={}, model=compiled.model, compare_step=compare)
    with pytest.raises(UserError, match="gives samples alone other gradients than in twos") as error:
        exactness_check._check_decisions(compiled, rank, frozenset())  # pyright: ignore[reportPrivateUsage]
    assert f"norm.bias is off by {off:.3g}" in error.value.message and remedy in error.value.remedy
    assert error.value.where == "model.py:12"


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
