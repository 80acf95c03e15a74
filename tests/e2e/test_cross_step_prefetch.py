"""A frozen tower in training mode computes forwards of the next step: its random numbers are those of the
step that uses them, and bad samples are left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks
from tools.compare_training import (
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 4, 12
pytestmark = pytest.mark.gloo


def ahead(trace: Path) -> list[dict[str, Any]]:
    return [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e["args"].get("ahead")]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tower on one rank, the rest on two, micro-batches of unlike sizes."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    pins = ("tower.dp=1", "tower.micro_batch=3", "model.dp=2", "model.micro_batch=2")
    made = compile_and_write(
        MODELS / "frozen_tower.py",
        path,
        cluster="local:3",
        global_batch=GLOBAL_BATCH,
        strategy="apart",
        set=pins,
    )
    assert made.plan.run_ahead_gib > 0
    return path


def test_dropout_in_prefetched_forwards_draws_like_one_rank(apart: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    compile_and_write(MODELS / "frozen_tower.py", alone, cluster="local:1", global_batch=GLOBAL_BATCH)
    for plan, ranks, name in ((alone, 1, "one"), (apart, 3, "apart")):
        trace = ["--trace", str(tmp_path / f"{name}.json")]
        run_plan_ranks(
            plan, ranks, ["--steps", str(STEPS), "--workers", "0", "--log-dir", str(tmp_path / name), *trace]
        )
    one, found = (read_metrics(tmp_path / name) for name in ("one", "apart"))
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in one], rel=1e-5)
    assert [m["grad_norm"] for m in found] == pytest.approx([m["grad_norm"] for m in one], rel=1e-4)
    assert ahead(tmp_path / "apart.json") and not ahead(tmp_path / "one.json")


def test_prefetched_samples_that_do_not_load_are_left_out(apart: Path, tmp_path: Path) -> None:
    """Sample 14 is in the second step, of which the first one computes a part."""
    for name, options in (("ahead", []), ("not", ["--run-ahead", "0"])):
        arguments = [
            "--steps",
            "3",
            "--workers",
            "0",
            "--skip-bad-samples",
            "--log-dir",
            str(tmp_path / name),
            *options,
        ]
        run_plan_ranks(apart, 3, arguments, {"FROZEN_TOWER_BAD": "14"})
    found, expected = (read_metrics(tmp_path / name) for name in ("ahead", "not"))
    assert [m["skipped"] for m in found] == [0, 1, 0]
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in expected], rel=1e-6)


def test_images_of_the_next_step_are_seen_before_the_last_texts_of_this_one(tmp_path: Path) -> None:
    """The tower and the teacher share ranks; the teacher's replica needs images that both have seen."""
    path = write_recording_model("taught_pictures", tmp_path, MODELS)
    pins = (
        "tower.with=teacher",
        "tower.dp=2",
        "tower.micro_batch=1",
        "teacher.tp=2",
        "teacher.micro_batch=1",
        "student.dp=1",
        "student.micro_batch=2",
    )
    compile_and_write(path, tmp_path / "plan", cluster="local:3", global_batch=GLOBAL_BATCH, set=pins)
    trace = ("--trace", str(tmp_path / "trace.json"))
    found = train_distributed(tmp_path / "plan", 3, STEPS, tmp_path / "run", *trace)
    expected = train_in_one_process(path, GLOBAL_BATCH, STEPS, tmp_path / "one")
    assert list(find_differences(found, expected)) == []
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    forwards = sorted((e for e in events if e.get("cat") == "F"), key=lambda e: e["ts"])
    order = [(e["args"]["section"], bool(e["args"].get("ahead"))) for e in forwards if e["pid"] == 0]
    assert ("tower", True) in order[: order.index(("teacher", True))]
    early = [k for k, what in enumerate(order) if what == ("tower", True)]
    assert any(("teacher", False) in order[k : k + 5] for k in early)


@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        # every stage has computed more of the next step than the one behind it
        pytest.param(
            4,
            ("teacher.pp=3", "teacher.micro_batch=1", "student.dp=1", "student.micro_batch=2"),
            marks=pytest.mark.slow,
        ),
        (4, ("teacher.tp=2", "teacher.ep=2", "teacher.micro_batch=1", "student.dp=2", "student.ep=2")),
        # replicas that send each other tokens run ahead in rounds
        (
            3,
            (
                "teacher.dp=2",
                "teacher.ep=2",
                "teacher.micro_batch=1",
                "student.dp=1",
                "student.micro_batch=2",
            ),
        ),
    ],
)
def test_frozen_mixtures_run_ahead(ranks: int, pins: tuple[str, ...], tmp_path: Path) -> None:
    path = write_recording_model("moe_distil", tmp_path, MODELS)
    made = compile_and_write(
        path, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=pins
    )
    assert made.plan.run_ahead_gib > 0
    trace = ("--trace", str(tmp_path / "trace.json"))
    found = train_distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run", *trace)
    expected = train_in_one_process(path, GLOBAL_BATCH, STEPS, tmp_path / "one")
    assert list(find_differences(found, expected)) == []
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counts = Counter(e["args"]["stage"] for e in events if e.get("args", {}).get("ahead"))
    stages = [counts[s.stage] for s in made.plan.sections if s.mode == "forward"]
    assert stages == sorted(stages, reverse=True) and stages[-1] > 0
    assert len(stages) == 1 or stages[0] > stages[-1]
