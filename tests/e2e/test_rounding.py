"""Runs that differ from plain PyTorch where plain PyTorch differs from itself: judged by that, and by nothing
else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tools.census import row_check
from tools.census.results import StoredResult
from tools.census.row_check import Outcome, RowResult, is_exact_run
from tools.census.table import write_table
from tools.compare_training import (
    TrainingResult,
    compute_exact_gradients,
    find_differences,
    measure_differences,
    train_in_one_process,
    write_recording_model,
)
from tools.rounding import (
    WITHIN_ROUNDING,
    judge_by_float64,
    judge_by_rounding,
    measure_own_differences,
)
from tools.train_plain import nudge_weights
from tools.zoo import GLOBAL_BATCH, STEPS

MODEL = '''
import torch
from torch import nn

class Iterated(nn.Module):
    """A logistic map of a layer's outputs: chaotic if iterated often."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x):
        h = self.layer(x).sigmoid()
        for _ in range({iterations}):
            h = 3.9 * h * (1 - h)
        return {loss}

def model():
    return Iterated()

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {{"x": torch.randn(8, generator=torch.Generator().manual_seed(i))}}

def dataset():
    return Samples()
'''
LOSS = "(h * torch.linspace(0, 1, 16)).sum(-1).mean()"
CHAOTIC, STABLE = 14, 1


def _written(folder: Path, iterations: int, loss: str = LOSS) -> Path:
    folder.mkdir()
    name = f"iterated_{folder.name}_{iterations}"  # modules of one name would be one
    (folder / f"{name}.py").write_text(MODEL.format(iterations=iterations, loss=loss))
    return write_recording_model(name, folder, folder)


def _train(model: Path, nudge: int = 0) -> TrainingResult:
    return train_in_one_process(model, GLOBAL_BATCH, STEPS, model.parent / f"trained_{nudge}", nudge=nudge)


def _own(model: Path, reference: TrainingResult) -> dict[str, float]:
    return measure_own_differences(reference, lambda nudge: _train(model, nudge))


def test_rounding_that_chaos_amplifies_is_told_from_a_wrong_result(tmp_path: Path) -> None:
    model = _written(tmp_path / "right", CHAOTIC)
    plain = _train(model)
    own = _own(model, plain)
    rounded_otherwise = _train(model, nudge=100)
    assert list(find_differences(rounded_otherwise, plain))
    judged = judge_by_rounding(rounded_otherwise, plain, own)
    assert judged.startswith(WITHIN_ROUNDING) and is_exact_run(judged)
    wrong = _train(_written(tmp_path / "wrong", CHAOTIC, LOSS.replace(".mean()", "[1:].mean()")))
    assert list(find_differences(wrong, plain)) and not judge_by_rounding(wrong, plain, own)
    scaled = _train(_written(tmp_path / "scaled", CHAOTIC, f"1.01 * {LOSS}"))
    scaled = replace(scaled, losses=plain.losses)
    assert not judge_by_rounding(scaled, plain, own)


def test_where_plain_pytorch_agrees_with_itself_the_tolerances_stay(tmp_path: Path) -> None:
    model = _written(tmp_path / "stable", STABLE)
    plain = _train(model)
    own = _own(model, plain)
    assert max(own.values()) <= 1
    off = replace(plain, losses=[loss * (1 + 3e-6) for loss in plain.losses])
    assert list(find_differences(off, plain)) and not judge_by_rounding(off, plain, own)


def test_each_quantity_is_judged_by_its_own_difference() -> None:
    plain = TrainingResult([1.0, 1.0], {"w": torch.ones(2)}, {"w": torch.ones(2)})
    found = TrainingResult([1.0, 1.001], {"w": torch.ones(2)}, {"w": torch.ones(2)})
    own = {"loss of step 1": 0.5, "loss of step 2": 8.0, "gradient of w": 500.0, "parameter w": 0.2}
    assert judge_by_rounding(found, plain, own) == (
        "within rounding: loss of step 2 is off by 10 tolerances, by up to 8 between references with weights "
        "that differ in their last bit"
    )
    assert not judge_by_rounding(found, plain, own | {"loss of step 2": 4.0})  # more than twice
    assert not judge_by_rounding(found, plain, own | {"loss of step 2": math.inf})
    assert not judge_by_rounding(found, plain, own | {"loss of step 1": 11.0})  # other random numbers
    assert not judge_by_rounding(plain, plain, own)
    other = replace(found, parameters={"w": torch.full((2,), 1.001)})
    assert not judge_by_rounding(other, plain, own)


BEFORE_NORM = """
import torch
from torch import nn
from torch.nn import functional as F


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(3, 8, 3), nn.InstanceNorm1d(8), nn.Linear(8, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(torch.relu(self.norm(self.conv(x))).mean(-1)), y)


def model():
    torch.manual_seed(0)
    return Normed()


def dataset():
    g = torch.Generator().manual_seed(1)
    samples = range(48)
    return [{"x": torch.randn(3, 9, generator=g), "y": torch.randint(0, 5, (), generator=g)} for _ in samples]
"""


def test_a_gradient_that_is_rounding_is_compared_with_float64(tmp_path: Path) -> None:
    (tmp_path / "before_norm.py").write_text(BEFORE_NORM)
    model = write_recording_model("before_norm", tmp_path, tmp_path)
    plain, exact = _train(model), compute_exact_gradients(model, GLOBAL_BATCH)
    noise, weight = plain.gradients["conv.bias"], plain.gradients["conv.weight"]
    assert noise is not None and weight is not None and exact["conv.bias"].norm() < 1e-6 * noise.norm()  # type: ignore[union-attr]
    total = sum(float(g.norm()) ** 2 for g in plain.gradients.values() if g is not None) ** 0.5
    # As a plan sums it: rounded otherwise, as large, and beyond the tolerance.
    scale = max(1.0, 3e-8 * total / float(noise.norm()))
    plain = replace(plain, gradients=plain.gradients | {"conv.bias": scale * noise})
    otherwise = replace(plain, gradients=plain.gradients | {"conv.bias": -scale * noise})
    assert list(find_differences(otherwise, plain))
    assert judge_by_float64(otherwise, plain, exact).startswith(WITHIN_ROUNDING)
    far = replace(plain, gradients=plain.gradients | {"conv.bias": -4 * scale * noise})
    wrong = replace(otherwise, gradients=otherwise.gradients | {"conv.weight": 1.001 * weight})
    lost = replace(plain, gradients=plain.gradients | {"conv.bias": None})
    for other in (far, wrong, lost, plain, replace(otherwise, losses=[2.0] * STEPS)):
        assert not judge_by_float64(other, plain, exact)


def test_what_is_no_number_is_beyond_any_tolerance() -> None:
    plain = TrainingResult([1.0], {"w": torch.ones(2)}, {"w": torch.ones(2)})
    nan = torch.tensor([1.0, torch.nan])
    for found in (
        replace(plain, losses=[math.nan]),
        replace(plain, gradients={"w": nan}),
        replace(plain, gradients={"w": None}),
        replace(plain, parameters={"w": nan}),
        replace(plain, losses=[]),
    ):
        assert len(list(find_differences(found, plain))) == 1
    assert all(d.tolerances == 0 for d in measure_differences(plain, plain))


def test_a_nudge_moves_each_weight_to_a_next_number() -> None:
    before, state = torch.nn.Linear(100, 100), torch.random.get_rng_state()
    after = torch.nn.Linear(100, 100)
    after.load_state_dict(before.state_dict())
    state = torch.random.get_rng_state()
    nudge_weights(after, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        up, down = (torch.nextafter(old, torch.full_like(old, far)) for far in (torch.inf, -torch.inf))
        assert ((new == up) | (new == down)).all()
        assert 0.3 < (new == up).float().mean() < 0.7


@pytest.mark.parametrize("iterations", (CHAOTIC, STABLE))
def test_a_row_of_the_census_says_how_it_was_judged(
    iterations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _written(tmp_path / "model", iterations)
    plain = _train(model)
    found = _train(model, nudge=100)
    if iterations == STABLE:
        found = replace(found, losses=[1.001 * loss for loss in plain.losses])
    monkeypatch.setattr(row_check, "train_on_ranks", lambda *_: (found, plain))
    monkeypatch.setattr(row_check, "_run_in_float64", lambda *_: "")
    compiled = cast(Any, SimpleNamespace(plan=SimpleNamespace(draws=())))
    row = RowResult("segmentation/oneformer", "segmentation", Outcome.EXACT)
    run = row_check._run(row, compiled, model, tmp_path)  # pyright: ignore[reportPrivateUsage]
    assert is_exact_run(run) == (iterations == CHAOTIC)
    assert run.startswith(WITHIN_ROUNDING if iterations == CHAOTIC else "run: loss of step 1")
    docs = tmp_path / "docs"
    (docs / "benchmarks").mkdir(parents=True)
    versions = {"torch": "2", "transformers": "5", "commit": "abc"}
    write_table({row.name: StoredResult(replace(row, run=run), versions)}, docs)
    page = (docs / "census.md").read_text()
    assert ("## Within rounding" in page) == (iterations == CHAOTIC)
    assert ("1 within what rounding makes of it" in page) == (iterations == CHAOTIC)
