"""Changes since a checkpoint are refused by name, or accepted with an option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.training.options import parse_options
from secc.runtime.training.run_settings import check_settings, describe_model, describe_settings
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import ALONE, APART, FIXTURE, write_plan


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
    return describe_settings(0, False, clip, str(length), describe_model(model), optimizer, scheduler)


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
            with pytest.raises(UserError, match=r"this run has another .* than the checkpoint") as caught:
                check_settings(settings_of(), settings, (), "here")
            assert f"--allow-change {name}" in caught.value.remedy
            assert len(check_settings(settings_of(), settings, (name,), "here")) == 1
    assert parse_options(["--allow-change", "seed", "--allow-change", "clip"]).allow_change == (
        "seed",
        "clip",
    )


def chained(step_size: int = 5, milestone: int = 3) -> Callable[[torch.optim.Optimizer], object]:
    lr = torch.optim.lr_scheduler
    return lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.StepLR(o, step_size)], [milestone])


def no_schedule(optimizer: torch.optim.Optimizer) -> None:
    return None


def decaying(rate: float) -> Callable[[torch.optim.Optimizer], object]:
    return lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate**step)


@pytest.mark.parametrize(
    ("before", "now", "is_other"),
    [
        (chained(), chained(), False),
        (chained(), chained(step_size=9), True),
        (chained(), chained(milestone=4), True),
        (decaying(0.9), decaying(0.9), False),
        (decaying(0.9), decaying(0.8), True),
        (decaying(0.9), no_schedule, True),
        (no_schedule, no_schedule, False),
    ],
)
def test_parts_of_schedulers_are_compared(before: object, now: object, is_other: bool) -> None:
    def describe(make: Any) -> dict[str, str]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        return describe_settings(0, False, None, "", {}, optimizer, make(optimizer))

    if not is_other:
        assert check_settings(describe(before), describe(now), (), "here") == []
        return
    with pytest.raises(UserError, match="another scheduler than the checkpoint") as caught:
        check_settings(describe(before), describe(now), (), "here")
    assert "--allow-change scheduler" in caught.value.remedy


def test_a_schedule_that_depends_on_the_length_of_the_run_names_both_lengths() -> None:
    def describe(steps: int, rate: float = 1.0, of_steps: bool = True) -> dict[str, str]:
        optimizer, lr = torch.optim.SGD(nn.Linear(2, 2).parameters()), torch.optim.lr_scheduler
        by_step = lr.LambdaLR(optimizer, lambda step: rate - step / steps)
        scheduler = by_step if of_steps else lr.StepLR(optimizer, 5)
        return describe_settings(0, False, None, "", {}, optimizer, scheduler, steps)

    with pytest.raises(
        UserError, match="scheduler than the checkpoint: that of 400 steps became that of 4000"
    ) as e:
        check_settings(describe(400), describe(4000), (), "here")
    assert "--steps 400, as before" in e.value.remedy and "--allow-change scheduler" in e.value.remedy
    with pytest.raises(
        UserError, match=r"factors 1 0.9975 0.9925 .* at steps 0, 1, 3, 10, .* became 2 1.9975"
    ):
        check_settings(describe(400), describe(400, 2.0), (), "here")
    with pytest.raises(UserError, match=r"LambdaLR\(.* became StepLR\(") as e:
        check_settings(describe(400), describe(4000, of_steps=False), (), "here")
    assert "--steps" not in e.value.remedy


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "AdamW(params, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))",
            "betas of {} was (0.9, 0.999), and is (0.8, 0.9)",
        ),
        (
            "AdamW([{{'params': [p]}} if n != {!r} else {{'params': [p], 'lr': 1e-3}} for n, p in params],"
            " lr=1e-2, weight_decay=0.1)",
            "lr of {} was 0.01, and is 0.001",
        ),
    ],
)
def test_options_of_single_parameters_are_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str, text: str
) -> None:
    """Also under another plan, where another rank has them."""
    name, old = "embed.weight", "AdamW(params, lr=1e-2, weight_decay=0.1)"
    source = (FIXTURE / "model.py").read_text()
    assert old in source
    save = ["--save", str(tmp_path / "saved"), "--resume", "auto"]
    write_plan(tmp_path / "plan", APART)
    assert run_plan(tmp_path / "plan", ["--steps", "2", *save]) == 0
    write_plan(tmp_path / "other", ALONE, source=source.replace(old, line.format(name)))
    assert run_plan(tmp_path / "other", ["--steps", "4", *save]) == 2
    errors = capfd.readouterr().err
    assert "another optimizer than the checkpoint: " in errors and "--allow-change optimizer" in errors
    assert text.partition("{}")[2] in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.gloo
def test_resumed_run_is_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, save = tmp_path / "plan", ["--save", str(tmp_path / "saved"), "--resume", "auto"]
    write_plan(plan, ALONE)
    assert run_plan(plan, ["--steps", "2", *save]) == 0
    assert run_plan(plan, ["--steps", "4", *save, "--clip", "1"]) == 2
    assert (
        "another limit of gradients (--clip) than the checkpoint: None became 1.0" in capfd.readouterr().err
    )
    assert run_plan(plan, ["--steps", "4", *save, "--clip", "1", "--allow-change", "clip"]) == 0
