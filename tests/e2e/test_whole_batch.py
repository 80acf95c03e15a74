"""Blocks that couple the samples of a batch by themselves (batch norms in training mode, codebooks that move
with the batch) are refused without `--whole-batch`, and with it train as in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import find_differences, read_metrics, run_plan_ranks
from tools.compare_training import train_distributed, train_in_one_process, write_recording_model
from tools.train_plain import train_model

MODELS = Path(__file__).parent.parent / "models"
TOWER = MODELS / "normed_tower.py"
APART = ("images=tower", "texts=tokens+mlp+head")


def assert_buffers_equal(path: Path, samples: int, steps: int, saved: Path) -> None:
    """Compares the buffers of a checkpoint with those of plain PyTorch."""
    model, _ = train_model(load_model_file(path), steps, samples)
    found = load_full_state_dict(saved)
    for name, expected in model.named_buffers():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_the_message_names_the_block() -> None:
    with pytest.raises(UserError, match="tower couples the samples of a batch: batch norm") as refused:
        compile_model(TOWER, CompileOptions())
    assert "--whole-batch tower" in refused.value.remedy


def test_a_tower_with_batch_norms_takes_all_samples_of_a_step_in_one_micro_batch() -> None:
    options = CompileOptions(cluster="local:2", global_batch=12, whole_batch=("tower",))
    plan = check_exactness(compile_model(TOWER, options), required=True).plan
    assert [(s.name, s.whole_batch) for s in plan.sections] == [("tower", True), ("model", False)]


def test_several_replicas_have_norms_alone_in_common() -> None:
    """A batch norm that the user's code calls as a function is not synchronized."""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "batch", "choices"),
    [
        (3, 7, {"strategy": "apart", "sections": APART, "set": ("images.dp=2", "texts.dp=1")}),
        *(
            pytest.param(ranks, batch, {"sections": APART, "set": pins}, marks=pytest.mark.slow)
            for ranks, batch, pins in (
                (1, 7, ()),
                (2, 7, ("images.dp=2", "texts.dp=2", "texts.micro_batch=1", "images.with=texts")),
                (2, 7, ("images.dp=2", "texts.dp=2", "images.recompute=full", "images.with=texts")),
                (1, 7, ("images.recompute=full",)),
                (3, 4, ("images.dp=3", "texts.dp=3", "images.with=texts", "images.sharding=zero1")),
                (2, 7, ("images.dp=1", "texts.dp=1", "texts.micro_batch=1")),
            )
        ),
    ],
)
def test_ranks_train_with_statistics_of_all_samples(
    ranks: int, batch: int, choices: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    """Uneven numbers of images on replicas, in some steps fewer than replicas, against plain PyTorch."""
    path = write_recording_model("normed_tower", tmp_path, MODELS)
    options = CompileOptions(
        cluster=f"local:{ranks}", global_batch=batch, whole_batch=("tower",), **choices
    )
    compile_model(path, options).write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, batch, 4, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 4, tmp_path / "run")
    assert list(find_differences(found, expected)) == []
    assert_buffers_equal(path, batch, 4, tmp_path / "run" / "saved")
