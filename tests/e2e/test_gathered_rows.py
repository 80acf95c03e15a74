"""Losses that compare the samples of a batch are refused without `--gather`, and with it are those of plain
PyTorch on the whole batch, in any micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.step_preview import preview_step
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.plan.schema import is_gathered
from tests.e2e.harness import read_metrics, run_plan_ranks
from tools.compare_training import (
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
BOTH = ("image", "text")
LOSSES = {
    "clip": ("image", "out"),
    "siglip": ("image", "out"),
    "supervised": ("image",),
    "joined": ("image", "out"),
    "hardest": ("image", "out"),
    "spread": ("image",),
}


def test_the_message_names_the_blocks_to_gather() -> None:
    with pytest.raises(UserError, match="pairs every sample with every other") as refused:
        compile_model(MODELS / "contrastive.py", CompileOptions())
    assert "--gather left --gather right computes it exactly" in refused.value.remedy
    compiled = check_exactness(
        compile_model(MODELS / "contrastive.py", CompileOptions(gather=("left", "right")))
    )
    assert [t.entries for t in compiled.plan.terms if is_gathered(t.name)] == [16, 16]
    (note,) = preview_step(compiled).plan.checks["notes"]
    assert note.startswith("each step begins with a forward of all micro-batches")


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_over_pairs_of_samples_are_exact_in_micro_batches(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPARED", loss)
    options = CompileOptions(gather=LOSSES[loss], global_batch=12, cluster="local:2")
    check_exactness(compile_model(MODELS / "compared_samples.py", options), required=True)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (
            3,
            {
                "sections": ("image=image", "text=text+out"),
                "strategy": "apart",
                "set": ("text.dp=2", "text.micro_batch=1"),
            },
        ),
        *(
            pytest.param(ranks, {"sections": ("model=image+text+out",), "set": pins}, marks=pytest.mark.slow)
            for ranks, pins in (
                (2, ("model.dp=2", "model.micro_batch=2", "model.recompute=full")),
                (2, ("model.dp=2", "model.micro_batch=1", "model.sharding=zero3")),
                (2, ("model.pp=2", "model.micro_batch=1")),
                (4, ("model.tp=2", "model.dp=2", "model.micro_batch=1")),
            )
        ),
    ],
)
def test_ranks_train_with_rows_of_all_samples(
    ranks: int, choices: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    """5 samples on several replicas, against plain PyTorch with the whole batch."""
    path = write_recording_model("compared_samples", tmp_path, MODELS)
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=5, gather=("image", "out"), **choices)
    compile_model(path, options).write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, 5, 3, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 3, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(UserError, match="--gather lef: the model has no such block") as refused:
        compile_model(MODELS / "contrastive.py", CompileOptions(gather=("lef", "right")))
    assert refused.value.remedy == "blocks are left, right"


def test_rows_that_nothing_compares_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPARED", "supervised")
    with pytest.raises(UserError, match="no loss compares rows of text with those") as refused:
        compile_model(MODELS / "compared_samples.py", CompileOptions(gather=("image", "text")))
    assert "leave it out" in refused.value.remedy


@pytest.mark.gloo
def test_an_evaluation_compares_all_samples_of_the_set(tmp_path: Path) -> None:
    one = {"sections": ("model=image+text+out",), "set": ("model.dp=2",)}
    options = CompileOptions(cluster="local:2", global_batch=6, gather=("image", "out"), **one)
    compile_model(MODELS / "compared_samples.py", options).write_plan(tmp_path / "plan", report_page)
    run = ["--steps", "2", "--eval-every", "2", "--eval-batch", "5", "--workers", "0"]
    run += ["--save", str(tmp_path / "run"), "--log-dir", str(tmp_path)]
    run_plan_ranks(tmp_path / "plan", 2, run)
    user = load_model_file(MODELS / "compared_samples.py")
    model = user.build_model()
    model.load_state_dict(load_full_state_dict(tmp_path / "run"))
    evaluated = user.call_function("eval_dataset")
    with torch.no_grad():
        expected = model(**user.collate(evaluated))
    found = next(m for m in read_metrics(tmp_path) if "eval" in m)
    assert found["loss"] == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert found["right"] == pytest.approx(float(expected["right"]), rel=1e-6)
