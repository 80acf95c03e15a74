"""Plans with fused operators inside the user's modules train like plain PyTorch without them, in
combination with other plan features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from secc.report.plan_tables import fused_table
from secc.runtime.model.user_file import load_model_file
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.e2e.reference_runs import write_named_recording_model
from tools.zoo import EXACT, look
from tools.zoo_models import entry

MODELS = Path(__file__).parent.parent / "models"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, GLOBAL_BATCH = 4, 12

LLAVA = ("language_model.sharding=zero1", "language_model.recompute=selective", "vision_tower.recompute=full")
CASES = [
    ("llava_tiny", 3, LLAVA, {"swiglu", "rms-norm", "residual-norm", "rope", "layer-norm"}),
    pytest.param(
        "qwen_distil",
        3,
        ("student.sharding=zero2", "student.recompute=full", "student.dp=2"),
        {"swiglu", "rms-norm", "residual-norm", "rope"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "vlm_digits",
        3,
        (),
        {"swiglu", "rms-norm", "residual-norm", "rope", "layer-norm"},
        marks=pytest.mark.slow,
    ),
    pytest.param("odds_ratio", 2, (), {"linear-cross-entropy"}, marks=pytest.mark.slow),
    pytest.param("whisper_tiny", 2, (), {"layer-norm", "residual-norm"}, marks=pytest.mark.slow),
    # ranks that share the rows of a sample (a part's last label lies in the next part), or deal samples
    pytest.param(
        "llama",
        4,
        ("model.cp=4", "model.cp_per=section", "model.sharding=zero3"),
        {"swiglu", "rms-norm", "residual-norm", "rope", "linear-cross-entropy"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "llama",
        4,
        ("model.cp=2", "model.tp=2", "model.cp_per=section", "model.recompute=full"),
        {"swiglu", "rms-norm", "residual-norm", "rope", "linear-cross-entropy"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "qwen_distil",
        4,
        ("teacher.cp=2", "student.cp=2", "student.cp_per=section", "student.recompute=selective"),
        {"swiglu", "rms-norm", "residual-norm", "rope", "linear-kl-ce"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "qwen_distil",
        5,
        ("teacher.dp=1", "student.cp=4", "student.cp_per=micro_batch", "student.sharding=zero2"),
        {"swiglu", "rms-norm", "residual-norm", "rope", "linear-kl-ce"},
        marks=pytest.mark.slow,
    ),
    # experts over replicas, and inside one
    pytest.param(
        "glm4_moe",
        2,
        ("model.dp=2", "model.ep=2", "model.micro_batch=2"),
        {"swiglu", "rms-norm", "residual-norm"},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "glm4_moe",
        2,
        ("model.tp=2", "model.ep=2"),
        {"swiglu", "rms-norm", "residual-norm"},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "ranks", "choices", "rules"), CASES)
def test_fused_plans_train_as_plain_pytorch(
    name: str, ranks: int, choices: tuple[str, ...], rules: set[str], tmp_path: Path
) -> None:
    if (EXAMPLES / f"{name}.py").exists():
        model = write_recording_model(name, tmp_path, EXAMPLES)
    else:
        model = write_named_recording_model(name, tmp_path)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    options: dict[str, Any] = dict(
        cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=choices, fuse=True
    )
    plan = compile_and_write(model, tmp_path / "plan", **options).plan
    assert {row[0] for row in fused_table(plan).rows} >= rules
    found = train_distributed(tmp_path / "plan", plan.world_size, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (1, ()),
        pytest.param(2, ("policy.pp=2", "policy.backward=split"), marks=pytest.mark.slow),
        pytest.param(2, ("policy.tp=2", "policy.micro_batch=3"), marks=pytest.mark.slow),
        pytest.param(4, ("policy.pp=2", "policy.dp=2", "policy.recompute=full"), marks=pytest.mark.slow),
    ],
)
def test_answers_that_integers_mark_are_scored_row_by_row(
    ranks: int, choices: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_recording_model("marked_answers", tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    plan = compile_and_write(
        model, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=choices, fuse=True
    ).plan
    heads = [row[1] for row in fused_table(plan).rows if row[0] == "linear-cross-entropy"]
    assert sorted(heads) == ["policy.head (row by row)", "reference.head (row by row)"]
    found = train_distributed(tmp_path / "plan", plan.world_size, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.slow
@pytest.mark.gloo
def test_the_distillation_example_trains_as_plain_pytorch(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.safetensors"
    model = write_recording_model("distill_text", tmp_path, EXAMPLES)
    model.write_text(f"import os\n\nos.environ['DISTILL_TEACHER'] = {str(teacher)!r}\n" + model.read_text())
    torch.manual_seed(1)
    save_file(dict(load_model_file(model).module.teacher().named_parameters()), teacher)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    plan = compile_and_write(
        model, tmp_path / "plan", cluster="local:2", global_batch=GLOBAL_BATCH, strategy="apart", fuse=True
    ).plan
    assert plan.rewrites
    assert (
        list(find_differences(train_distributed(tmp_path / "plan", 2, STEPS, tmp_path / "run"), reference))
        == []
    )


@pytest.mark.slow
def test_rerecorded_glue_works_with_fused_heads() -> None:
    row = look(entry("qwen2_5_vl"), run=False, fuse=True)
    assert row.check == EXACT


@pytest.mark.slow
@pytest.mark.gloo
def test_random_ops_inside_rewritten_modules_draw_as_before(tmp_path: Path) -> None:
    model = write_recording_model("gated_dropout", tmp_path, MODELS)
    compile_and_write(model, tmp_path / "plan1", cluster="local:1", global_batch=GLOBAL_BATCH)
    reference = train_distributed(tmp_path / "plan1", 1, STEPS, tmp_path / "run1")
    again = ("decoder.dp=2", "decoder.recompute=full")
    plan = compile_and_write(
        model, tmp_path / "plan2", cluster="local:2", global_batch=GLOBAL_BATCH, set=again, fuse=True
    ).plan
    gated = next(r for r in plan.rewrites if r.cls == "T5DenseGatedActDense")
    text = (tmp_path / "plan2" / "sections" / "fused.py").read_text()
    assert len(gated.modules) == 4 and "self.dropout(geglu)" in text
    found = train_distributed(tmp_path / "plan2", plan.world_size, STEPS, tmp_path / "run2")
    assert list(find_differences(found, reference)) == []


@pytest.mark.slow
@pytest.mark.gloo
def test_checkpoints_pass_between_fused_and_other_plans(tmp_path: Path) -> None:
    model = write_recording_model("llava_tiny", tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    for name, fuse in (("fused", True), ("own", False)):
        compile_and_write(
            model,
            tmp_path / name,
            check=False,
            cluster="local:2",
            global_batch=GLOBAL_BATCH,
            fuse=fuse,
            strategy="colocate",
        )
    train_distributed(tmp_path / "fused", 2, 2, tmp_path / "first")
    found = train_distributed(
        tmp_path / "own", 2, STEPS, tmp_path / "second", "--resume", str(tmp_path / "first" / "saved")
    )
    assert found.losses[-2:] == pytest.approx(reference.losses[2:], rel=1e-4)
