"""Losses and gradients that are not finite: what the run does about them, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from secc.runtime.monitoring.metrics import MetricsLog
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import FIXTURE, UNEVEN, write_plan
from tests.runtime.run_processes import steps_of


def poisoned(plan: Path) -> None:
    """Writes a plan with a dataset in which sample 13 has an infinite picture from epoch 0 on."""
    source = (FIXTURE / "model.py").read_text()
    pixels = "torch.randn(images, 3, 4, 4, generator=g)"
    assert pixels in source
    write_plan(plan, UNEVEN, source=source.replace(pixels, f'{pixels} * (float("inf") if i == 13 else 1.0)'))


@pytest.mark.slow
@pytest.mark.gloo
def test_stop_names_the_module_and_saves_what_was_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    poisoned(plan)
    assert run_plan(plan, ["--steps", "4", "--save", str(saved), "--max-restarts", "2"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error: step 2: the loss is nan") == 1 and "Traceback" not in errors
    assert "of section encoder, samples [" in errors and "13" in errors and "module encoder" in errors
    assert (saved / "latest").read_text() == "step_00000001\n"
    assert all(bool(t.isfinite().all()) for t in load_full_state_dict(saved).values())


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_skip_leaves_the_update_out_and_warn_goes_on(
    tmp_path: Path, policy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    poisoned(plan)
    assert run_plan(plan, ["--steps", "2", "--save", str(saved), "--on-nan", policy]) == 0
    assert "step 2: the loss is nan" in capfd.readouterr().err
    line = steps_of(plan / "logs")[1]
    assert line["loss"] is None and "loss" in line["not_finite"]
    finite = all(bool(t.isfinite().all()) for t in load_full_state_dict(saved).values())
    assert finite == (policy == "skip")


def test_metrics_are_strict_json_and_name_spikes(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 100)
    common = {"grad_norm": float("nan"), "samples": 1, "tokens": 1, "step_time_s": 1.0}
    torch.manual_seed(0)
    for step in range(1, 71):
        loss = 9.0 if step == 60 else 2.0 + 0.1 * float(torch.rand(()))
        log.log_step({"step": step, "loss": loss, **common})
    log.close()

    def refuse(text: str) -> None:
        raise ValueError(text)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line, parse_constant=refuse) for line in lines]
    assert values[0]["grad_norm"] is None and values[0]["not_finite"] == {"grad_norm": "nan"}
    assert [v["step"] for v in values if "spike" in v] == [60]
