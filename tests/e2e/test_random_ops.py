"""A model with random ops trains the same on any number of ranks, in micro-batches of any size and in any
order.

The reference is the plan for one rank. That plan itself is compared with the eager model, which draws the
same numbers, when it is made.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.errors import UserError
from secc.runtime.training.eager_reference import LOSS_TOLERANCE
from tests.e2e.harness import compile_and_write, find_differences, train_distributed, write_recording_model

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 3, 12


WAYS = {
    "dropout": [
        (2, "auto", ("model.dp=2", "model.micro_batch=1")),
        (3, "auto", ("model.dp=3", "model.micro_batch=3")),
    ],
    "dropout_passes": [(2, "auto", ("model.pp=2", "model.micro_batch=3"))],
    "gpt2_dropout": [(3, "auto", ("model.dp=3", "model.micro_batch=3", "model.recompute=full"))],
    "shared_dropout": [(3, "apart", ("encoder.pp=2", "encoder.micro_batch=1", "layers.micro_batch=2"))],
    "drawn_masks": [(3, "apart", ("head.dp=2", "head.micro_batch=1", "vision.micro_batch=3"))],
    "drawn_rows": [(3, "apart", ("model.dp=3", "model.micro_batch=1"))],
    "draws_per_sample": [(3, "apart", ("model.dp=2", "model.micro_batch=1"))],
    "random_parts": [(3, "apart", ("model.dp=2", "model.micro_batch=1"))],
}
SLOW = ("gpt2_dropout", "random_parts", "shared_dropout")


@pytest.mark.gloo
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in WAYS])
def test_random_ops_draw_the_same_under_any_plan(name: str, tmp_path: Path) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    assert compile_and_write(
        model, tmp_path / "plan1", cluster="local:1", global_batch=GLOBAL_BATCH
    ).plan.draws
    reference = train_distributed(tmp_path / "plan1", 1, STEPS, tmp_path / "run1")
    for ranks, strategy, pins in WAYS[name]:
        plan = tmp_path / f"plan{ranks}"
        compile_and_write(
            model,
            plan,
            check=False,
            cluster=f"local:{ranks}",
            global_batch=GLOBAL_BATCH,
            strategy=strategy,
            set=pins,
        )
        found = train_distributed(
            plan, ranks, STEPS, tmp_path / f"run{ranks}", *(("--order", "dataset") if ranks == 3 else ())
        )
        assert list(find_differences(found, reference)) == []
        assert found.losses == pytest.approx(reference.losses, rel=10 * LOSS_TOLERANCE)


@pytest.mark.gloo
def test_each_step_and_seed_draws_other_numbers(tmp_path: Path) -> None:
    (tmp_path / "still.py").write_text(STILL)
    compile_and_write(tmp_path / "still.py", tmp_path / "plan", cluster="local:1", global_batch=4)
    losses = [
        train_distributed(tmp_path / "plan", 1, 3, tmp_path / f"run{i}", "--seed", str(seed)).losses
        for i, seed in enumerate((0, 0, 1))
    ]
    assert losses[0] == losses[1]
    assert len({*losses[0], *losses[2]}) == 6


REFUSED = [
    (
        "F.dropout(h.repeat(3, 1), 0.5).view(3, -1, 4).mean(0)",
        "does not compute what plain PyTorch computes",
        "switch it off to see",
    ),
    ("h * float(np.random.rand())", "draws random numbers from NumPy", "draw with torch"),
    (
        "h + torch.poisson(torch.ones_like(h))",
        "aten.poisson.default draws random numbers, which cannot be tied to samples",
        "dropout",
    ),
]


@pytest.mark.parametrize(("expression", "message", "remedy"), REFUSED)
def test_random_numbers_that_cannot_be_tied_to_samples_are_refused(
    expression: str, message: str, remedy: str, tmp_path: Path
) -> None:
    source = MODEL.replace("HIDDEN", expression)
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(UserError) as error:
        compile_and_write(tmp_path / "model.py", tmp_path / "plan", cluster="local:1", global_batch=4)
    assert message in error.value.message and remedy in error.value.remedy
    assert "model.py" in error.value.where


MODEL = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Inner(nn.Module):
    def forward(self, h):
        return HIDDEN


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.inner(self.first(x))).mean()


def model():
    return Net()


def dataset():
    return [{"x": torch.ones(4) * (i + 1)} for i in range(8)]
"""

STILL = """
import torch
from torch import nn


class Still(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return (nn.functional.dropout(self.linear(x), 0.5) * x).sum(-1).mean()


def model():
    return Still()


def dataset():
    return [{"x": torch.ones(4) * (i + 1)} for i in range(4)]


def optimizer(params):
    return torch.optim.SGD([p for _, p in params], lr=0.0)
"""
