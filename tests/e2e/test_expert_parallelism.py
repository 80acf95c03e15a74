"""Experts divided over ranks: replicas without samples in a round, tokens that all go to one expert, frozen
teachers, and checkpoints that continue under plans with another ep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from secc.cli import main
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from tests.e2e.harness import find_differences, train_distributed, train_in_one_process, write_recording_model
from tests.e2e.reference_runs import write_named_recording_model

MODELS = Path(__file__).parent.parent / "models"
STEPS = 3


def _plan(path: Path, work: Path, ranks: int, batch: int, *pins: str) -> Path:
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=batch, set=pins)
    compile_model(path, options).write_plan(work / "plan", report_page)
    return work / "plan"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("model", "ranks", "batch", "pins"),
    [
        # 5 samples on 4 replicas: three of them have nothing in the second round
        ("glm4_moe", 4, 5, ("model.dp=4", "model.ep=4", "model.micro_batch=1", "model.recompute=full")),
        pytest.param(
            "one_expert", 4, 6, ("model.dp=4", "model.ep=2", "model.sharding=zero1"), marks=pytest.mark.slow
        ),
        pytest.param("one_expert", 2, 6, ("model.tp=2", "model.ep=2"), marks=pytest.mark.slow),
        # micro-batches that pass by mixtures, one in the middle or the last ones
        ("early_exit", 2, 6, ("model.dp=2", "model.ep=2", "model.micro_batch=1", "model.recompute=full")),
        *(
            pytest.param("early_exit", 4, 6, pins, marks=pytest.mark.slow)
            for pins in (
                ("model.dp=4", "model.ep=4", "model.micro_batch=1"),
                ("model.dp=4", "model.ep=2", "model.micro_batch=1", "model.sharding=zero3"),
                ("model.dp=2", "model.tp=2", "model.ep=4", "model.micro_batch=1", "model.recompute=full"),
                ("model.dp=4", "model.ep=4", "model.sharding=zero3", "model.recompute=selective"),
            )
        ),
        # a vision tower next to text layers of experts; with features of its layers on the way
        *(
            pytest.param("qwen3_vl_moe_tiny", ranks, 8, pins, marks=pytest.mark.slow)
            for ranks, pins in (
                (3, ("language_model.tp=2", "language_model.ep=2", "visual.dp=1")),
                (4, ("language_model.dp=4", "language_model.ep=4", "visual.with=language_model")),
                (
                    3,
                    (
                        "language_model.dp=2",
                        "language_model.ep=2",
                        "language_model.micro_batch=1",
                        "language_model.recompute=full",
                        "language_model.sharding=zero1",
                        "visual.dp=1",
                    ),
                ),
                (
                    4,
                    (
                        "language_model.dp=2",
                        "language_model.tp=2",
                        "language_model.ep=4",
                        "language_model.sharding=zero2",
                        "visual.with=language_model",
                    ),
                ),
            )
        ),
        # a round without samples on some replicas, where layers are gathered
        pytest.param(
            "glm4_moe",
            4,
            5,
            ("model.dp=4", "model.ep=4", "model.micro_batch=1", "model.sharding=zero3"),
            marks=pytest.mark.slow,
        ),
        # a round without samples on a replica of a stage that has no mixture
        pytest.param(
            "glm4_moe",
            4,
            5,
            ("model.pp=2", "model.dp=2", "model.ep=2", "model.micro_batch=1"),
            marks=pytest.mark.slow,
        ),
        # modules in a list: 5 samples on 4 replicas, and every way of holding parameters and activations
        ("listed_experts", 4, 5, ("model.dp=4", "model.ep=4", "model.micro_batch=1")),
        *(
            pytest.param("listed_experts", ranks, 6, pins, marks=pytest.mark.slow)
            for ranks, pins in (
                (2, ("model.tp=2", "model.ep=2", "model.sharding=zero1", "model.micro_batch=2")),
                (4, ("model.tp=4", "model.ep=4", "model.recompute=full")),
                (4, ("model.tp=2", "model.dp=2", "model.ep=2", "model.sharding=zero3")),
                (4, ("model.tp=2", "model.dp=2", "model.ep=4", "model.sharding=zero1")),
                (4, ("model.dp=4", "model.ep=2", "model.sharding=zero2", "model.recompute=full")),
                (4, ("model.dp=4", "model.ep=4", "model.sharding=zero3", "model.recompute=selective")),
                (4, ("model.pp=2", "model.dp=2", "model.ep=2", "model.sharding=zero1")),
                (4, ("model.pp=2", "model.tp=2", "model.ep=2")),
            )
        ),
        pytest.param(
            "moe_distil",
            4,
            6,
            ("teacher.dp=2", "teacher.ep=2", "student.dp=2", "student.ep=2", "teacher.micro_batch=1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experts_on_different_ranks_train_as_plain_pytorch(
    model: str, ranks: int, batch: int, pins: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_recording_model(model, tmp_path, MODELS)
    plan = _plan(path, tmp_path, ranks, batch, *pins)
    expected = train_in_one_process(path, batch, STEPS, tmp_path / "one")
    found = train_distributed(plan, ranks, STEPS, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_continues_under_another_ep(tmp_path: Path) -> None:
    """ep 4 over replicas, then ep 2 inside a replica, the inner width by tp, no division, and ep 2 over
    replicas with sharded states."""
    path = write_recording_model("glm4_moe", tmp_path, MODELS)
    expected = train_in_one_process(path, 6, 5, tmp_path / "one")
    layouts = (
        (4, ("dp=4", "ep=4")),
        (2, ("tp=2", "ep=2")),
        (2, ("tp=2",)),
        (1, ("dp=1",)),
        (4, ("dp=4", "ep=2", "sharding=zero2")),
    )
    losses: list[float] = []
    for step, (ranks, pins) in enumerate(layouts, 1):
        plan = _plan(path, tmp_path / f"layout{step}", ranks, 6, *(f"model.{pin}" for pin in pins))
        resume = ("--resume", str(tmp_path / f"run{step - 1}" / "saved")) if step > 1 else ()
        found = train_distributed(plan, ranks, step, tmp_path / f"run{step}", *resume)
        losses += found.losses
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.parameters.items():
        assert torch.allclose(found.parameters[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.gloo
@pytest.mark.slow
def test_the_same_plan_gives_the_same_bits(tmp_path: Path) -> None:
    path = write_recording_model("glm4_moe", tmp_path, MODELS)
    plan = _plan(path, tmp_path, 4, 6, "model.dp=4", "model.ep=4", "model.micro_batch=1")
    first, second = (train_distributed(plan, 4, 2, tmp_path / f"run{i}") for i in range(2))
    assert first.losses == second.losses
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name]), name


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "listed_experts"])
def test_exported_weights_start_runs_with_any_ep(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts in four parts are exported whole under the user's names; each part reads its own of them."""
    path = write_named_recording_model(name, tmp_path)
    plan = _plan(path, tmp_path / "first", 4, 6, "model.dp=4", "model.ep=4", "model.sharding=zero1")
    trained = train_distributed(plan, 4, 2, tmp_path / "run")
    weights = tmp_path / "weights" / "model.safetensors"
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "run" / "saved"), "-o", str(weights)])
    assert end.value.code in (None, 0), capsys.readouterr().err
    exported = load_file(weights)
    assert exported.keys() == load_model_file(path).build_model().state_dict().keys()
    assert all(torch.equal(value, trained.parameters[n]) for n, value in exported.items())
    losses = [
        train_distributed(
            _plan(path, tmp_path / f"next{number}", ranks, 6, *pins),
            ranks,
            2,
            tmp_path / f"run{number}",
            "--init",
            str(weights.parent),
        ).losses
        for number, (ranks, pins) in enumerate(
            [(1, ("model.dp=1",)), (2, ("model.tp=2", "model.ep=2")), (2, ("model.dp=2", "model.ep=2"))]
        )
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
