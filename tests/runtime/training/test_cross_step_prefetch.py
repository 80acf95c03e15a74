"""Runs with a prefetching frozen teacher: exact, equal after a resumption, and nothing prefetched in the last
step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.captioner_plans import Layout, Reference, reference, write_plan
from tests.runtime.train_captioner import metrics, train
from tests.runtime.training.test_trainer import assert_trained

STEPS = 5
PREFETCH_GIB = 4000 / 2**30  # GiB: two or three of the four micro-batches of each step
BESIDE: Layout = {"encoder": (0,), "teacher": (1,), "decoder": (0,)}
UNEVEN: Layout = {"encoder": (1,), "teacher": (3, 2), "decoder": (0, 1)}
pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def plain() -> Reference:
    return reference(STEPS)


def teacher_forwards(trace: Path) -> list[dict[str, Any]]:
    """Returns the teacher's forwards in the order in which they ran."""
    events = sorted(
        (e for e in json.loads(trace.read_text())["traceEvents"] if "ts" in e), key=lambda e: e["ts"]
    )
    return [e["args"] for e in events if e["cat"] == "F" and e["args"]["section"] == "teacher"]


@pytest.mark.parametrize(
    ("layout", "widths", "arguments"),
    [
        (BESIDE, "own", ["--debug-comm"]),
        (UNEVEN, "own", ["--comm", "rounds"]),
        (UNEVEN, "global", ["--order", "dataset"]),
    ],
    ids=["beside", "uneven-in-rounds", "global-widths"],
)
def test_steps_equal_plain_pytorch(
    tmp_path: Path, plain: Reference, layout: Layout, widths: str, arguments: list[str]
) -> None:
    write_plan(tmp_path / "plan", layout, widths, run_ahead=PREFETCH_GIB)
    ranks = train(tmp_path / "plan", layout, STEPS, "--trace", str(tmp_path / "trace.json"), *arguments)
    assert_trained(tmp_path / "plan", ranks, plain)
    forwards = teacher_forwards(tmp_path / "trace.json")
    assert len([e for e in forwards if e.get("ahead")]) >= 2 * (STEPS - 1)  # in every step but the last one
    assert sum(len(e["samples"]) for e in forwards) == 8 * STEPS  # each sample once
    times = [
        json.loads(line)["sections"]["teacher"]
        for line in (tmp_path / "plan" / "logs" / "times.jsonl").read_text().splitlines()
    ]
    assert (
        sum(t["predicted_forward_s"] for t in times) == pytest.approx(8 * STEPS * 1e-6)
        and sum(t["forward_s"] for t in times) > 0
    )


def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", UNEVEN, run_ahead=PREFETCH_GIB)
    uninterrupted = train(tmp_path / "plan", UNEVEN, STEPS, "--log-dir", str(tmp_path / "whole"))
    train(
        tmp_path / "plan", UNEVEN, 2, "--log-dir", str(tmp_path / "first"), "--save", str(tmp_path / "saved")
    )
    resumed = train(
        tmp_path / "plan",
        UNEVEN,
        STEPS,
        "--log-dir",
        str(tmp_path / "rest"),
        "--resume",
        str(tmp_path / "saved"),
    )
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert all(torch.equal(value, b["state"][name]) for name, value in a["state"].items())


def test_run_ahead_of_a_run_replaces_the_memory_of_the_plan(tmp_path: Path, plain: Reference) -> None:
    write_plan(tmp_path / "plan", BESIDE, run_ahead=PREFETCH_GIB)
    train(tmp_path / "plan", BESIDE, 2, "--run-ahead", "0", "--trace", str(tmp_path / "trace.json"))
    assert [row["loss"] for row in metrics(tmp_path / "plan")] == pytest.approx(plain.losses[:2], rel=1e-6)
    assert not any(e.get("ahead") for e in teacher_forwards(tmp_path / "trace.json"))
