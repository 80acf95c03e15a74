"""User code that asks for ranks sees one process in a run, as in plain PyTorch; code that asks for parameters
of other ranks is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import assert_same_training, compile_and_write, run_plan_ranks
from tests.e2e.reference_runs import MODELS_FOLDER

MODEL = MODELS_FOLDER / "asks_for_ranks.py"
GLOBAL_BATCH = 12


@pytest.mark.gloo
def test_code_that_asks_for_ranks_sees_one_process(tmp_path: Path) -> None:
    sections = ("tower=tower", "text=embed+body+head")
    compile_and_write(
        MODEL,
        tmp_path / "plan",
        cluster="local:3",
        global_batch=GLOBAL_BATCH,
        strategy="apart",
        sections=sections,
        set=("text.dp=2",),
    )
    assert_same_training(MODEL, tmp_path, 3, GLOBAL_BATCH)


@pytest.mark.gloo
def test_a_module_that_asks_for_parameters_of_another_rank_is_refused_with_its_line(tmp_path: Path) -> None:
    model = tmp_path / "asks.py"
    model.write_text(
        """
import torch
from torch import nn
from tests.models import one_rate_for_all
from tests.models.one_rate_for_all import collate, dataset

class Body(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        object.__setattr__(self, "owner", owner)

    def forward(self, x):
        return self.linear(x) + torch.ones(16, device=next(self.owner.parameters()).device)

def model():
    made = one_rate_for_all.model()
    made.body = Body(made)
    return made
"""
    )
    compile_and_write(
        model,
        tmp_path / "plan",
        cluster="local:2",
        global_batch=GLOBAL_BATCH,
        strategy="apart",
        sections=("tower=tower", "text=embed+body+head"),
    )
    expected = r"asks.py:14: section text asks for a parameter that is on another rank"
    with pytest.raises(AssertionError, match=expected):
        run_plan_ranks(tmp_path / "plan", 2, ["--steps", "1", "--log-dir", str(tmp_path)])
