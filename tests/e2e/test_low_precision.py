"""Models that compute in 16 bits by their own code: plans train them as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.training.eager_reference import FLOAT32_TOLERANCES, derive_tolerances
from secc.runtime.training.one_rank_plan import OneRankPlan
from tests.e2e.harness import (
    compile_and_write,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.e2e.reference_runs import MODELS_FOLDER, list_rounded_differences

GLOBAL_BATCH, STEPS = 6, 2
BFLOAT16, FLOAT16 = (derive_tolerances([d]) for d in (torch.bfloat16, torch.float16))
VARIANTS = {
    "teacher_cast": BFLOAT16,
    "teacher_weight_dtype": BFLOAT16,
    "teacher_half": FLOAT16,
    "autocast_inside": BFLOAT16,
    "autocast_island": BFLOAT16,
    "accelerate": BFLOAT16,
    "wrapped": BFLOAT16,
    "whole": BFLOAT16,
    "tables": FLOAT32_TOLERANCES,
    "wide_tables": FLOAT32_TOLERANCES,
}

QUICK = ("teacher_weight_dtype", "teacher_half", "autocast_island", "wide_tables")


def write_variant(variant: str, folder: Path) -> str:
    """Writes the model file of a variant; returns its name."""
    name = f"low_precision_{variant}"
    source = (MODELS_FOLDER / "low_precision.py").read_text()
    text = source.replace('os.environ.get("LOW_PRECISION", "teacher_cast")', f'str("{variant}")')
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.mark.parametrize(
    "variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS]
)
def test_plans_are_exact_in_own_dtypes_and_in_float32(variant: str, tmp_path: Path) -> None:
    name = write_variant(variant, tmp_path)
    compiled = compile_and_write(
        tmp_path / f"{name}.py", tmp_path / "plan", cluster="local:2", global_batch=8
    )
    assert len(compiled.plan.sections) > 1
    assert compiled.plan.widths == "own"
    (pattern,) = compiled.plan.checks["patterns"]
    tolerances = VARIANTS[variant]
    if tolerances == FLOAT32_TOLERANCES:
        assert "tolerances" not in pattern
    else:
        assert pattern["tolerances"] == f"{tolerances}; also exact with float32 in place of 16 bits"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("variant", "choices"),
    [
        ("teacher_cast", ("student.pp=2",)),
        ("accelerate", ("student.tp=2",)),
        pytest.param("autocast_inside", ("student.pp=2",), marks=pytest.mark.slow),
        pytest.param("teacher_half", ("student.tp=2",), marks=pytest.mark.slow),
        pytest.param("whole", ("student.pp=2",), marks=pytest.mark.slow),
        pytest.param("autocast_island", ("student.dp=2", "student.sharding=zero2"), marks=pytest.mark.slow),
    ],
)
def test_three_ranks_train_as_plain_pytorch(variant: str, choices: tuple[str, ...], tmp_path: Path) -> None:
    model = write_recording_model(write_variant(variant, tmp_path), tmp_path, tmp_path)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compiled = compile_and_write(
        model, tmp_path / "plan", cluster="local:3", global_batch=GLOBAL_BATCH, set=choices, strategy="apart"
    )
    assert compiled.plan.world_size == 3
    found = train_distributed(tmp_path / "plan", 3, STEPS, tmp_path / "run")
    assert list(list_rounded_differences(found, reference, VARIANTS[variant])) == []


def test_errors_below_the_rounding_of_16_bits_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A divisor that is off by 0.5 % is within the tolerances of bfloat16, and is refused all the same."""
    file = tmp_path / f"{write_variant('whole', tmp_path)}.py"
    compiled = compile_model(file, CompileOptions(cluster="local:2", global_batch=8, widths="own"))
    sum_leaves = OneRankPlan._sum_leaves  # pyright: ignore[reportPrivateUsage]

    def sum_more(plan: OneRankPlan, singles: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {name: value * 1.005 for name, value in sum_leaves(plan, singles).items()}

    monkeypatch.setattr(OneRankPlan, "_sum_leaves", sum_more)
    with pytest.raises(UserError, match="does not compute what plain PyTorch computes"):
        check_exactness(compiled)


def test_dtype_blames_tables_that_stay_in_float32(tmp_path: Path) -> None:
    name = write_variant("tables", tmp_path)
    file = tmp_path / f"{name}.py"
    file.write_text(
        file.read_text()
        .replace(".to(x.dtype)\n        with", "\n        with")
        .replace(".repeat(1, WIDTH))", ".repeat(1, WIDTH), persistent=False)")
    )
    with pytest.raises(UserError, match="are not saved \\(angles\\) stay float32") as refused:
        compile_and_write(file, tmp_path / "plan", cluster="local:2", global_batch=8, dtype="bf16")
    assert refused.value.message.startswith("--dtype bf16: forward fails in plain PyTorch too")
