"""`secc drift`: compares times and samples of a run, from logs as a run writes them, with the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secc.cli import main
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.replan_from_run import measure_drift
from secc.errors import UserError
from secc.runtime.monitoring.section_times import SECTION_TIMES_FILE, section_time_columns
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan

MODEL = Path(__file__).parent.parent / "models" / "llava_tiny.py"
IMAGES = ("pixel_values",)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision tower and a language model on four ranks."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    compile_model(MODEL, CompileOptions(cluster="local:4", strategy="apart", global_batch=32)).write_plan(
        path, lambda plan: ""
    )
    return path


def write_run_log(
    directory: Path, of: Plan, moved: dict[str, float], images: int = 16, steps: int = 6
) -> Path:
    """Write the log of a run with section times of `moved` times the prediction, and images in `images` of
    32 samples."""
    sections: dict[str, dict[str, float]] = {}
    words = {"F": "forward_s", "B": "backward_s"}
    for name, word in [(name, words[kind]) for name, kind, _ in section_time_columns(of) if kind in words]:
        sections.setdefault(name, {}).update({word: 0.5 * moved.get(name, 1.0), f"predicted_{word}": 0.5})
    sizes = {"B": 1, "S": 80, "n_pixel_values": 1}
    parts = [((), 32 - images, sizes | {"n_pixel_values": 0}), (IMAGES, images, sizes)]
    mix = [{"when": w, "count": n, "sizes": {k: v * n for k, v in each.items()}} for w, n, each in parts if n]
    directory.mkdir()
    lines = [json.dumps({"step": 1 + step, "sections": sections, "mix": mix}) for step in range(steps)]
    (directory / SECTION_TIMES_FILE).write_text("\n".join(lines) + "\n")
    return directory


def test_slower_section_gets_more_ranks(plan: Path, tmp_path: Path) -> None:
    found = measure_drift(plan, write_run_log(tmp_path / "logs", load_plan(plan), {"vision_tower": 12.0}))
    assert found.steps == 4 and found.sections["vision_tower"].forward == pytest.approx(12.0)
    assert found.sections["language_model"].backward == pytest.approx(1.0)
    assert found.gain > 0.3
    assert (
        found.plan.find_section("vision_tower").mesh.dp == 1
        and found.best_plan.find_section("vision_tower").mesh.dp > 1
    )
    assert f"vision_tower.dp={found.best_plan.find_section('vision_tower').mesh.dp}" in found.best_pins


def test_uniform_slowdown_gains_nothing(plan: Path, tmp_path: Path) -> None:
    same = measure_drift(plan, write_run_log(tmp_path / "same", load_plan(plan), {}))
    uniform = measure_drift(
        plan, write_run_log(tmp_path / "alike", load_plan(plan), {"vision_tower": 3.0, "language_model": 3.0})
    )
    assert uniform.gain == pytest.approx(same.gain, abs=0.02)
    assert uniform.plan.prediction["step_time_s"] == pytest.approx(
        3 * same.plan.prediction["step_time_s"], rel=0.02
    )


def test_mix_of_samples_matters(plan: Path, tmp_path: Path) -> None:
    few, many = (
        measure_drift(
            plan, write_run_log(tmp_path / str(n), load_plan(plan), {"vision_tower": 6.0}, images=n)
        )
        for n in (4, 32)
    )
    assert few.mix["pixel_values"][1] == pytest.approx(0.125) and many.mix["none"][1] == 0
    assert many.gain > few.gain


def test_command_prints_gain_and_choices(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = write_run_log(tmp_path / "logs", load_plan(plan), {"vision_tower": 12.0})
    with pytest.raises(SystemExit, match="0"):
        main(["drift", str(plan), str(logs)])
    text = " ".join(capsys.readouterr().out.split())
    assert "another plan would be" in text and "--set vision_tower.dp=" in text


def test_unusable_logs_are_rejected(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the run's log"):
        measure_drift(plan, tmp_path)
    with pytest.raises(UserError, match="no step after its first 2"):
        measure_drift(plan, write_run_log(tmp_path / "logs", load_plan(plan), {}, steps=2))
    (tmp_path / "logs" / SECTION_TIMES_FILE).write_text("one\n{}\n")
    with pytest.raises(UserError, match="not a line of a run's log: lacks the key 'step'") as error:
        measure_drift(plan, tmp_path / "logs")
    assert error.value.where == f"{tmp_path}/logs/{SECTION_TIMES_FILE}:2"
