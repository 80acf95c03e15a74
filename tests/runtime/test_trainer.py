"""A step under any plan computes what plain PyTorch computes with the whole global batch in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.captioner import ALONE, APART, TOGETHER, UNEVEN, Layout, Reference, reference, write_plan
from tests.runtime.workers import enter_plan, run_ranks

STEPS = 5
pytestmark = pytest.mark.gloo


def train(directory: Path, layout: Layout, steps: int, *arguments: str) -> list[dict[str, Any]]:
    """Train under the plan in `directory`; each rank returns its gradients of each step and its state dict at the end."""
    world_size = 1 + max(r for ranks in layout.values() for r in ranks)

    def target(rank: int) -> dict[str, Any]:
        enter_plan(directory)
        from sections import decoder, encoder, teacher, terms

        from secc.runtime.options import parse
        from secc.runtime.run import Run
        from secc.runtime.trainer import Trainer

        classes = {"encoder": encoder.Encoder, "teacher": teacher.Teacher, "decoder": decoder.Decoder}
        with Run(directory, parse(["--steps", str(steps), "--workers", "0", *arguments]), terms) as run:
            model = run.model()
            trainer = Trainer(run, model, [classes[n](model) for n, ranks in layout.items() if rank in ranks])
            gradients = []
            for batch in trainer.batches():
                trainer.step(batch)
                held = [(n, p) for n, p in model.named_parameters() if not p.is_meta]
                gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in held})
            return {"gradients": gradients, "state": {k: v.clone() for k, v in model.state_dict().items() if not v.is_meta}}

    return run_ranks(world_size, target)


@pytest.fixture(scope="module")
def plain() -> Reference:
    return reference(STEPS)


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "logs" / "metrics.jsonl").read_text().splitlines()]


def assert_gradients(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    """Each gradient within 1e-5 of its own norm plus 1e-8 of the global one; None exactly where plain PyTorch has None."""
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values() if g is not None))
    for name, gradient in found.items():
        wanted = expected[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            assert float((gradient - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-8 * whole, name


@pytest.mark.parametrize(
    ("layout", "widths", "arguments"),
    [(APART, "own", ["--debug-comm"]), (UNEVEN, "own", []), (TOGETHER, "global", []), (UNEVEN, "global", ["--order", "dataset"])],
    ids=["apart", "uneven", "together", "dataset-order"],
)
def test_steps_equal_plain_pytorch(tmp_path: Path, plain: Reference, layout: Layout, widths: str, arguments: list[str]) -> None:
    write_plan(tmp_path / "plan", layout, widths)
    ranks = train(tmp_path / "plan", layout, STEPS, *arguments)
    rows = metrics(tmp_path / "plan")
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-5)
    for rank in ranks:
        for found, expected in zip(rank["gradients"], plain.gradients, strict=True):
            assert_gradients(found, expected)
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)
    assert set().union(*(rank["state"] for rank in ranks)) == plain.state.keys()


def test_text_only_step_reaches_no_encoder_parameter(plain: Reference) -> None:
    assert plain.gradients[0]["encoder.patch.weight"] is None  # what the comparison above rests on
    assert plain.gradients[1]["encoder.patch.weight"] is not None


def test_clipping_is_by_the_global_norm(tmp_path: Path) -> None:
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
    assert all(row.keys() == {"step", "loss", "grad_norm", "samples", "tokens", "step_time_s"} for row in rows)
    assert all(row["samples"] == 8 and row["tokens"] > 8 for row in rows)
