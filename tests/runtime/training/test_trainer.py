"""A step under any plan computes what plain PyTorch computes for the whole global batch in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.captioner_plans import (
    ALONE,
    APART,
    TOGETHER,
    UNEVEN,
    Layout,
    Reference,
    reference,
    write_plan,
)
from tests.runtime.train_captioner import metrics, train

STEPS = 5
pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def plain() -> Reference:
    return reference(STEPS)


def assert_gradients(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    """Asserts that each gradient is within 1e-5 of its norm plus 1e-8 of the global norm, and None exactly
    where plain PyTorch has None."""
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values() if g is not None))
    for name, gradient in found.items():
        wanted = expected[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            assert float((gradient - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-8 * whole, name


def assert_trained(plan: Path, ranks: Sequence[dict[str, Any]], plain: Reference) -> None:
    """Asserts that losses, norms, gradients of all steps and parameters equal plain PyTorch."""
    rows = metrics(plan)
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-5)
    for rank in ranks:
        for found, expected in zip(rank["gradients"], plain.gradients, strict=True):
            assert_gradients(found, expected)
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "widths", "arguments"),
    [
        (APART, "own", ["--debug-comm"]),
        (UNEVEN, "own", []),
        (TOGETHER, "global", []),
        (UNEVEN, "global", ["--order", "dataset"]),
        (UNEVEN, "own", ["--comm", "rounds", "--debug-comm"]),
        (UNEVEN, "own", ["--comm", "rounds", "--order", "dataset"]),
    ],
    ids=["apart", "uneven", "together", "dataset-order", "rounds", "rounds-dataset-order"],
)
def test_steps_equal_plain_pytorch(
    tmp_path: Path, plain: Reference, layout: Layout, widths: str, arguments: list[str]
) -> None:
    write_plan(tmp_path / "plan", layout, widths)
    ranks = train(tmp_path / "plan", layout, STEPS, *arguments)
    assert_trained(tmp_path / "plan", ranks, plain)
    lines = (tmp_path / "plan" / "logs" / "times.jsonl").read_text().splitlines()
    sections = [json.loads(line)["sections"] for line in lines]
    assert all(s["teacher"]["exposed_s"] == 0 for s in sections)  # it has no gradients to sum
    assert sum(s["encoder"]["exposed_s"] + s["decoder"]["exposed_s"] for s in sections) > 0
    assert set().union(*(rank["state"] for rank in ranks)) == plain.state.keys()


def test_in_flight_limit_changes_no_gradient(tmp_path: Path, plain: Reference) -> None:
    write_plan(tmp_path / "plan", UNEVEN, cap=True)
    ranks = train(tmp_path / "plan", UNEVEN, STEPS, "--debug-comm")
    assert [row["loss"] for row in metrics(tmp_path / "plan")] == pytest.approx(plain.losses, rel=1e-6)
    for rank in ranks:
        for found, expected in zip(rank["gradients"], plain.gradients, strict=True):
            assert_gradients(found, expected)


def test_text_only_step_reaches_no_encoder_parameter(plain: Reference) -> None:
    assert plain.gradients[0]["encoder.patch.weight"] is None  # what the comparison above rests on
    assert plain.gradients[1]["encoder.patch.weight"] is not None


def test_clipping_uses_the_global_norm(tmp_path: Path) -> None:
    plain = reference(3, clip=0.1)
    write_plan(tmp_path / "plan", UNEVEN)
    ranks = train(tmp_path / "plan", UNEVEN, 3, "--clip", "0.1")
    rows = metrics(tmp_path / "plan")
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-5)
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)


def test_metrics_have_the_stable_fields(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", ALONE)
    train(tmp_path / "plan", ALONE, 2)
    rows = metrics(tmp_path / "plan")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(
        row.keys()
        == {"step", "loss", "grad_norm", "learning_rate", "samples", "tokens", "step_time_s", "run"}
        for row in rows
    )
    assert all(row["samples"] == 8 and row["tokens"] > 8 for row in rows)
