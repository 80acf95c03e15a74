"""Changes since a checkpoint are refused by name, or accepted with an option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.training.options import parse_options
from secc.runtime.training.run_settings import check_settings, describe_model, describe_settings
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import ALONE, write_plan


def settings_of(
    rate: float = 1e-3,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    dropout: float = 0.1,
    frozen: bool = False,
    length: int = 40,
    step_size: int = 5,
    clip: float | None = None,
) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(dropout), nn.Linear(2, 2))
    model[2].requires_grad_(not frozen)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
    return describe_settings(0, False, clip, length, describe_model(model), optimizer, scheduler)


def test_every_change_is_refused_by_name_and_can_be_allowed() -> None:
    changes = {
        "optimizer": [settings_of(rate=1e-2), settings_of(make=torch.optim.SGD)],
        "scheduler": [settings_of(step_size=7)],
        "modules": [settings_of(dropout=0.2)],
        "trainable": [settings_of(frozen=True)],
        "dataset": [settings_of(length=41)],
        "clip": [settings_of(clip=1.0)],
    }
    assert check_settings(settings_of(), settings_of(), (), "here") == []
    for name, changed in changes.items():
        for settings in changed:
            with pytest.raises(UserError, match=f"{name} of the run have changed") as caught:
                check_settings(settings_of(), settings, (), "here")
            assert f"--allow-change {name}" in caught.value.remedy
            assert len(check_settings(settings_of(), settings, (name,), "here")) == 1
    assert parse_options(["--allow-change", "seed", "--allow-change", "clip"]).allow_change == (
        "seed",
        "clip",
    )


@pytest.mark.slow
@pytest.mark.gloo
def test_resumed_run_is_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, save = tmp_path / "plan", ["--save", str(tmp_path / "saved"), "--resume", "auto"]
    write_plan(plan, ALONE)
    assert run_plan(plan, ["--steps", "2", *save]) == 0
    assert run_plan(plan, ["--steps", "4", *save, "--clip", "1"]) == 2
    assert "clip of the run have changed: None became 1.0" in capfd.readouterr().err
    assert run_plan(plan, ["--steps", "4", *save, "--clip", "1", "--allow-change", "clip"]) == 0
