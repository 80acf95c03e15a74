"""Scalars that forward returns in addition to the loss: a run logs those of the whole global batch, and
the plan names the ones it cannot compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks

PATH = Path(__file__).parent.parent / "models" / "logged.py"
EXACT = {"ce", "mse", "sum", "right", "percent", "total", "accuracy", "weight", "bias"}


@pytest.mark.gloo
def test_a_run_logs_the_scalars_of_the_whole_batch(tmp_path: Path) -> None:
    pins = ("teacher.micro_batch=2", "student.micro_batch=3")
    compiled = compile_and_write(
        PATH, tmp_path / "plan", cluster="local:2", global_batch=7, strategy="apart", set=pins
    )
    run_plan_ranks(tmp_path / "plan", 2, ["--steps", "1", "--log-dir", str(tmp_path), "--workers", "0"])
    (found,) = read_metrics(tmp_path)

    user = load_model_file(PATH)
    batch = user.collate([user.load_sample(i) for i in range(7)])
    wanted = user.build_model()(**batch)
    assert set(found) - {"spread"} == EXACT | {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "run",
        "samples",
        "tokens",
        "step_time_s",
    }
    for name in EXACT:
        assert found[name] == pytest.approx(float(torch.as_tensor(wanted[name]).detach()), rel=1e-6, abs=1e-6)

    spread = [
        user.build_model()(**{k: v[part] for k, v in batch.items()})["spread"].item()
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert min(spread) / 2 < found["spread"] < 2 * max(spread)
    (note,) = compiled.plan.checks["logged"]
    assert note.startswith(
        "spread is logged as the mean of the micro-batches' own values, "
        "weighted by samples: aten.std.correction"
    )


def test_a_scalar_that_no_plan_can_compute_is_not_logged_and_merges_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = PATH.read_text().replace('"spread": hidden.std()', '"spread": sum(row.norm() for row in hidden)')
    path.write_text(text)
    plan = compile_model(path, CompileOptions()).plan
    (note,) = plan.checks["notes"]
    assert note.startswith("further results of forward are not logged, because") and "model.py:" in note
    assert [t.name for t in plan.terms] == ["cross_entropy", "mse"]
    assert sorted(b for s in plan.sections for b in s.blocks) == ["head", "student", "teacher"]


@pytest.mark.gloo
def test_scalars_next_to_recorded_glue_are_logged_and_evaluated(tmp_path: Path) -> None:
    path = PATH.parent / "scored_grids.py"
    plan = compile_and_write(
        path, tmp_path / "plan", cluster="local:2", global_batch=6, strategy="apart"
    ).plan
    (note,) = plan.checks["notes"]
    assert note.startswith("glue is re-recorded for each micro-batch")
    arguments = ["--steps", "1", "--eval-every", "1", "--save", str(tmp_path / "saved"), "--workers", "0"]
    run_plan_ranks(tmp_path / "plan", 2, [*arguments, "--log-dir", str(tmp_path)])
    step, evaluated = read_metrics(tmp_path)

    user = load_model_file(path)
    model = user.build_model()
    wanted = model(**user.collate([user.load_sample(i) for i in range(6)]))
    assert {name: step[name] for name in ("right", "count")} == {n: wanted[n] for n in ("right", "count")}
    model.load_state_dict(load_full_state_dict(tmp_path / "saved"))
    wanted = model(**user.collate(user.call_function("eval_dataset")))
    assert evaluated["right"] == wanted["right"] > 0
    assert evaluated["summed"] == evaluated["gathered"] == int(wanted["right"]) / int(wanted["count"])


@pytest.mark.parametrize(
    "use",
    [
        "0.5 * ce.item() * mse",
        "torch.full_like(ce, ce.item())",
        "(mse if ce.item() > 0 else ce)",
        "float(ce) * mse",
    ],
)
def test_a_number_known_only_at_run_time_is_logged(use: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(PATH.read_text().replace('"loss": ce + 0.5 * mse', f'"loss": {use}'))
    with pytest.raises(UserError, match="Python reads a value") as refused:
        compile_model(path, CompileOptions())
    assert (
        "model.py:" in refused.value.where
        and "if it is for the log, return the tensor" in refused.value.remedy
    )
