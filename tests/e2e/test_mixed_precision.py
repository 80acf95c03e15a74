"""`--dtype bf16`: plans train like a handwritten mixed-precision recipe, and sums stay in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from secc.errors import UserError
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.training.eager_reference import LossAndGradients, compare_results
from tests.e2e.harness import (
    TrainingResult,
    compile_and_write,
    run_plan_ranks,
    train_distributed,
    write_recording_model,
)
from tests.e2e.reference_runs import (
    MODELS_FOLDER,
    list_rounded_differences,
    train_mixed_by_hand,
    write_named_recording_model,
)

GLOBAL_BATCH = 8
HALF = """
import nano
from nano import dataset

def model():
    return nano.model().bfloat16()
"""


CASES = [
    ("qwen_distil", 3, ("student.tp=2",)),
    ("nano", 2, ("model.pp=2",)),
    ("nano", 2, ("model.dp=2", "model.sharding=zero3")),
]
# losses on parts of the vocabulary, fused operators, glue that is recorded again, an accepted approximation
SLOW = [
    ("llava_tiny", 3, ("language_model.sharding=zero1", "vision_tower.recompute=full")),
    ("vocabulary", 2, ("teacher.tp=2", "layers.tp=2", "teacher.with=layers")),
    (
        "llava_tiny",
        4,
        (
            "language_model.tp=2",
            "language_model.sharding=zero1",
            "vision_tower.with=language_model",
            "--fuse",
        ),
    ),
    ("qwen_distil", 2, ("student.tp=2", "student.micro_batch=3", "--fuse")),
    ("qwen2_5_vl", 2, ("language_model.tp=2", "visual.with=language_model")),
    ("qwen2_5_vl", 3, ("language_model.dp=2", "language_model.sharding=zero1")),
    ("experts", 1, ("model.micro_batch=8", "--accept")),
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "choices"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]
)
def test_a_plan_trains_like_the_handwritten_recipe(
    name: str, ranks: int, choices: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_named_recording_model(name, tmp_path)
    reference = train_mixed_by_hand(model, GLOBAL_BATCH, 3)
    pins = tuple(c for c in choices if not c.startswith("--"))
    options: dict[str, Any] = {
        "cluster": f"local:{ranks}",
        "global_batch": GLOBAL_BATCH,
        "set": pins,
        "dtype": "bf16",
        "fuse": "--fuse" in choices,
    }
    compiled = compile_and_write(
        model, tmp_path / "plan", accept=("balance-loss",) if "--accept" in choices else (), **options
    )
    assert all(e.dtype == "bfloat16" for e in compiled.plan.edges if e.grad)
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, 3, tmp_path / "run")
    assert list(list_rounded_differences(found, reference)) == []


@pytest.mark.gloo
def test_gradients_are_summed_in_float32(tmp_path: Path) -> None:
    """Samples one by one round alike on one rank and on two: what is left is the order of float32 sums."""
    model = write_recording_model("nano", tmp_path, MODELS_FOLDER)
    runs: list[TrainingResult] = []
    for ranks, sharding in ((1, "none"), (2, "zero2")):
        plan = tmp_path / f"plan{ranks}"
        choices = ("model.micro_batch=1", f"model.sharding={sharding}")
        compile_and_write(
            model,
            plan,
            False,
            cluster=f"local:{ranks}",
            global_batch=GLOBAL_BATCH,
            max_sections=1,
            set=choices,
            dtype="bf16",
        )
        runs.append(train_distributed(plan, ranks, 2, tmp_path / f"run{ranks}"))
    one, two = (LossAndGradients(r.losses[0], r.gradients) for r in runs)
    assert all(g is None or g.dtype == torch.float32 for g in two.gradients.values())
    difference = compare_results(two, one)
    assert difference.is_exact, difference

    # Masters are what is saved: resumed, the run goes on as if it had not stopped.
    plan, saved = tmp_path / "plan2", tmp_path / "again"
    run_plan_ranks(
        plan,
        2,
        ["--steps", "1", "--log-dir", str(saved / "a"), "--save", str(saved), "--workers", "0"],
        {"GRADIENTS": str(tmp_path)},
    )
    resumed = [
        "--steps",
        "2",
        "--log-dir",
        str(saved / "b"),
        "--resume",
        str(saved),
        "--save",
        str(saved),
        "--workers",
        "0",
    ]
    run_plan_ranks(plan, 2, resumed, {"GRADIENTS": str(tmp_path)})
    for name, value in load_full_state_dict(saved).items():
        assert torch.equal(value, runs[1].parameters[name]), name


def test_impossible_mixed_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected one of bf16, got 'fp8'"):
        compile_and_write(MODELS_FOLDER / "nano.py", tmp_path / "plan", dtype="fp8")
    model = tmp_path / "half.py"
    model.write_text(f"import sys\nsys.path.insert(0, {str(MODELS_FOLDER)!r})\n{HALF}")
    with pytest.raises(UserError, match="are bfloat16 already"):
        compile_and_write(model, tmp_path / "plan", dtype="bf16")
