"""Before its first step a run compares the plan with plain PyTorch on a few samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.runtime.parameters.rank_weights import load_user_model
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.first_check import FirstCheckResult, compare_first_samples, start_first_check
from secc.runtime.training.supervisor import run_plan
from tests.e2e.harness import compile_and_write

MODEL = """
import os, torch
from torch import nn
from torch.utils.data import Dataset
SCALE = float(os.environ.get("FIRST_CHECK_SCALE", "1"))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.extra = nn.Linear(4, 1)
    def forward(self, x, y, z=None):
        seen = self.body(x).squeeze(-1)
        if z is not None:
            seen = seen + self.extra(z).mean()
        return SCALE * (seen - y).square().mean()
def model():
    return Net()
class Samples(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"x": torch.randn(4, generator=g), "y": torch.randn((), generator=g)}
def dataset():
    return Samples()
"""


@pytest.fixture(scope="module")
def plan_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first_check")
    (folder / "model.py").write_text(MODEL)
    compile_and_write(folder / "model.py", folder / "plan", cluster="local:1", global_batch=4)
    return folder / "plan"


def compare(directory: Path) -> FirstCheckResult:
    plan = load_plan(directory)
    return compare_first_samples(plan, directory, load_user_model(plan, directory))


def test_an_unchanged_model_is_equal(plan_directory: Path) -> None:
    found = compare(plan_directory)
    assert not found.left_out and found.expected == pytest.approx(found.computed)
    assert max(found.loss_difference, found.gradient_difference) <= 1


def test_a_constant_that_has_changed_is_found(plan_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_CHECK_SCALE", "3")
    found = compare(plan_directory)
    assert found.expected == pytest.approx(3 * found.computed)
    assert found.loss_difference > 1 and found.gradient_difference > 1 and found.worst


def test_what_cannot_be_compared_is_left_to_the_run(plan_directory: Path) -> None:
    plan = load_plan(plan_directory)
    user = load_user_model(plan, plan_directory)

    def fail(samples: object) -> None:
        raise RuntimeError("no such image")

    user.collate = fail  # pyright: ignore[reportAttributeAccessIssue]
    assert compare_first_samples(plan, plan_directory, user).left_out == "no such image"
    check = start_first_check(plan, plan_directory, user)
    assert check is not None
    check.finish()


@pytest.mark.gloo
def test_a_stale_plan_is_refused_before_its_first_step(
    plan_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FIRST_CHECK_SCALE", "3")
    options = ["--steps", "1", "--log-dir", str(tmp_path)]
    assert run_plan(plan_directory, options) == 2
    error = capfd.readouterr().err
    assert "model.py:" in error and "the plan does not compute what the model computes" in error
    assert "compile the model again" in error and not (tmp_path / "metrics.jsonl").exists()
    assert run_plan(plan_directory, [*options, "--no-first-check"]) == 0
