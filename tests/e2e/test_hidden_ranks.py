"""User code that asks for ranks sees one process in a run, as in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks
from tests.e2e.reference_runs import MODELS_FOLDER
from tools.train_plain import train_model

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
    arguments = ["--steps", "3", "--log-dir", str(tmp_path), "--save", str(tmp_path / "saved")]
    run_plan_ranks(tmp_path / "plan", 3, arguments)
    trained, losses = train_model(load_model_file(MODEL), 3, GLOBAL_BATCH)
    assert [m["loss"] for m in read_metrics(tmp_path)] == pytest.approx(losses, rel=1e-6)
    found = load_full_state_dict(tmp_path / "saved")
    for name, expected in trained.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
