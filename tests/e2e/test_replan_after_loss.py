"""A run that loses a rank goes on with the others under a plan for fewer, and returns to all of them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from secc.errors import UserError
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.options import parse_options
from secc.runtime.training.supervisor import run_plan
from tests.e2e.harness import compile_and_write
from tests.runtime.run_processes import (
    loader_of_rank,
    process_of_rank,
    ranks_of,
    start,
    steps_of,
    wait_for_step,
)

MODEL = Path(__file__).parents[2] / "examples" / "captions.py"


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_run_goes_on_with_fewer_ranks_and_returns(tmp_path: Path) -> None:
    plan, saved, whole = tmp_path / "plan", tmp_path / "saved", tmp_path / "whole"
    compile_and_write(
        MODEL,
        plan,
        check=False,
        cluster="local:3",
        global_batch=4,
        strategy="apart",
    )
    options = ["--steps", "200", "--save-every", "5", "--save"]
    assert run_plan(plan, [*options, str(whole), "--log-dir", str(tmp_path / "whole_logs")]) == 0
    loss = ["--max-restarts", "3", "--on-loss", "replan", "--rejoin-after", "12"]
    process = start("-m", "secc", "run", str(plan), *options, str(saved), *loss)
    wait_for_step(plan, 8, process)
    os.kill(process_of_rank(plan, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    fewer = tmp_path / "plan-on-2-ranks"
    assert f"rank 1 is lost: going on with 2 ranks under {fewer}, planned in" in errors
    assert load_plan(fewer).world_size == 2
    returned = re.search(r"stopped as asked after step (\d+) of 200", errors)
    # Ranks that are asked while they still start return without having saved.
    assert returned is None or f"rank 1 is tried again: returning to {plan}" in errors
    assert steps_of(plan / "logs")[-1]["step"] == 200
    expected, weights = load_full_state_dict(whole), load_full_state_dict(saved)
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, rtol=1e-4, atol=1e-6), name
    assert not list(ranks_of(plan)) and not list(ranks_of(fewer))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_a_killed_loader_is_no_lost_rank(tmp_path: Path) -> None:
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    compile_and_write(MODEL, plan, check=False, cluster="local:2", global_batch=4, strategy="apart")
    options = ["--steps", "40", "--save-every", "5", "--save", str(saved), "--on-loss", "replan"]
    process = start("-m", "secc", "run", str(plan), *options, "--max-restarts", "2")
    wait_for_step(plan, 2, process)
    os.kill(loader_of_rank(plan, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert "restart 1 of 2" in errors and "going on with" not in errors
    assert not list(tmp_path.glob("plan-on-*"))
    assert steps_of(plan / "logs")[-1]["step"] == 40


def test_replanning_needs_checkpoints_and_the_compiler(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--on-loss replan needs --save"):
        parse_options(["--on-loss", "replan"])
