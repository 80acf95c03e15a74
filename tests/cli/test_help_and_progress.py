"""What a new user sees: every option in --help, stages with a count, long work with the time left."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from secc.cli import main
from secc.cli.console import show_progress
from secc.driver.reading_rate import ReadingRate
from secc.runtime.model.user_file import load_model_file
from secc.runtime.monitoring.metrics import MetricsLog, duration_text
from secc.runtime.training import supervisor
from secc.runtime.training.options import parse_options


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ("--steps", "--save-every", "--resume", "--eval-every", "--report-to", "--ema", "--shuffle")),
        ("eval", ("--resume", "--eval-batch", "--init", "--workers")),
    ],
)
def test_help_lists_the_options_of_ranks(
    command: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert [o for o in options if o not in shown] == [] and "--eval-only" not in shown


def test_options_of_ranks_arrive_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "--no-first-check",
        "--no-save-async",
        "--shuffle",
        "--steps",
        "3",
        "--init",
        "a=b",
        "--init",
        "c",
    ]
    arrived: list[str] = []
    monkeypatch.setattr(supervisor, "run_plan", lambda plan, arguments, _: arrived.extend(arguments) or 0)
    with pytest.raises(SystemExit, match="0"):
        main(["run", "a_plan", *given])
    passed = parse_options(arrived)
    assert (passed.first_check, passed.save_async, passed.shuffle, passed.steps) == (False, False, True, 3)
    assert passed.init == parse_options(["--init", "a=b", "--init", "c"]).init


def test_stages_are_counted_and_timed(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(False, ("read", "capture", "write")) as show:
        for step in ("read", "capture", "a part of it", "read", "write"):
            show(step)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "secc: 1 of 3  read" and lines[1].startswith("secc: 2 of 3  capture  (read: 0.")
    assert (
        lines[2].startswith("secc: 3 of 3  write")
        and lines[3].startswith("secc: done in")
        and len(lines) == 4
    )


def test_long_stages_show_their_parts_at_a_steady_pace(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with show_progress(False, ("check", "read", "write")) as show:
        show("check")
        show("read")
        rate = ReadingRate(show)
        for done in range(1, 31):
            now += 1.0
            rate.show(done * 2**28, 30 * 2**28)
        show("write")
    assert capfd.readouterr().err.splitlines() == [
        "secc: 1 of 3  check",
        "secc: 2 of 3  read  (check: 0.0 s)",
        "secc: 2 of 3  read: 2.50 of 7.50 GiB, 0.25 GiB/s, 20 s left",
        "secc: 2 of 3  read: 5.00 of 7.50 GiB, 0.25 GiB/s, 10 s left",
        "secc: 2 of 3  read: 7.50 of 7.50 GiB, 0.25 GiB/s, 0 s left",
        "secc: 3 of 3  write  (read: 30.0 s)",
        "secc: done in 30.0 s",
    ]


def test_progress_says_samples_without_labels_and_the_time_left(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    metrics = MetricsLog(tmp_path, 100, stream)
    row = {"loss": 1.0, "grad_norm": 1.0, "samples": 8, "tokens": 0, "step_time_s": 0.5}
    for step in (1, 2):
        metrics.log_step(row | {"step": step, "recorded": 0, "kept": 0, "exposed_s": 0.0})
    shown = stream.getvalue()
    assert "16 samples/s" in shown and "tokens" not in shown and " left" in shown and "recorded" not in shown
    assert [duration_text(s) for s in (5, 600, 12000)] == ["5 s", "10 min", "3 h 20 min"]


@pytest.mark.parametrize(("parameters", "expected"), [("optimizer", []), ("optimizer, steps", [7])])
def test_the_scheduler_is_told_the_number_of_steps(
    parameters: str, expected: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "from torch.optim.lr_scheduler import LambdaLR\nseen = []\n"
        f"def scheduler({parameters}):\n    seen.extend([{parameters}][1:])\n"
        "    return LambdaLR(optimizer, lambda step: 1.0)\n"
    )
    user = load_model_file(path)
    user.build_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 7)
    assert user.module.seen == expected
