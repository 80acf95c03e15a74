"""Blocks that couple the samples of a batch by themselves (batch norms in training mode, codebooks that move
with the batch) are refused without `--whole-batch`, and with it train as in plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.report.plan_tables import micro_batch_text
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
    assert [micro_batch_text(s) for s in plan.sections] == ["all of a step", "6"]


@pytest.mark.parametrize("key", ["micro_batch", "most_samples", "micro_batch_tokens"])
def test_a_pinned_size_of_micro_batches_is_refused_for_a_whole_batch(key: str) -> None:
    options = CompileOptions(cluster="local:2", whole_batch=("tower",), set=(f"tower.{key}=4",))
    with pytest.raises(
        UserError, match=f"tower.{key}=4 is impossible: the section takes all samples"
    ) as refused:
        compile_model(TOWER, options)
    assert refused.value.remedy == "leave it out"


def test_a_norm_that_is_called_as_a_function_leaves_one_replica(tmp_path: Path) -> None:
    source = (MODELS / "batchnorm.py").read_text()
    called = """class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return F.batch_norm(x, None, None, self.weight, training=True)


class Classifier"""
    source = source.replace("class Classifier", called, 1).replace("nn.BatchNorm1d(16)", "Function()")
    (tmp_path / "model.py").write_text(source)
    options = CompileOptions(cluster="local:1", whole_batch=("norm",))
    plan = check_exactness(compile_model(tmp_path / "model.py", options), required=True).plan
    assert any(s.whole_batch and "norm" in s.blocks for s in plan.sections)
    with pytest.raises(UserError, match="dp=2 is impossible: the section takes all samples"):
        compile_model(
            tmp_path / "model.py",
            CompileOptions(
                cluster="local:2",
                whole_batch=("norm",),
                set=("model.dp=2",),
                sections=("model=inner+norm+head",),
            ),
        )


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(UserError, match="--whole-batch towers: the model has no such block"):
        compile_model(TOWER, CompileOptions(whole_batch=("towers",)))


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
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=batch, whole_batch=("tower",), **choices)
    compile_model(path, options).write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, batch, 4, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 4, tmp_path / "run")
    assert list(find_differences(found, expected)) == []
    assert_buffers_equal(path, batch, 4, tmp_path / "run" / "saved")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (2, {}),
        pytest.param(
            3,
            {
                "strategy": "apart",
                "set": ("encoder.dp=1", "encoder.micro_batch=2", "decoder.dp=1", "decoder.micro_batch=1"),
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_codebook_moves_as_in_plain_pytorch(
    ranks: int, choices: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    """Buffers that forward changes by sums over the batch, and a loss that the block itself takes the mean
    of."""
    path = write_recording_model("moving_codebook", tmp_path, MODELS)
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=7, whole_batch=("quantizer",), **choices)
    compiled = compile_model(path, options)
    compiled.write_plan(tmp_path / "plan", report_page)
    assert [s.name for s in compiled.plan.sections if s.whole_batch] == ["quantizer"]
    expected = train_in_one_process(path, 7, 4, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 4, tmp_path / "run")
    assert list(find_differences(found, expected)) == []
    assert_buffers_equal(path, 7, 4, tmp_path / "run" / "saved")


@pytest.mark.gloo
def test_lines_that_call_a_module_with_a_running_centre_take_the_whole_batch(tmp_path: Path) -> None:
    """The block is the lines; the buffer is of the module that they call, on the rank that runs them."""
    path = write_recording_model("running_centre", tmp_path, MODELS)
    with pytest.raises(UserError, match="a tensor of the model that forward changes") as refused:
        compile_model(path, CompileOptions(cluster="local:3", global_batch=9))
    (block,) = re.findall(r"--whole-batch (line_\d+)", refused.value.remedy)
    options = CompileOptions(cluster="local:3", global_batch=9, strategy="apart", whole_batch=(block,))
    compiled = check_exactness(compile_model(path, options), required=True)
    compiled.write_plan(tmp_path / "plan", report_page)
    (section,) = (s for s in compiled.plan.sections if s.whole_batch)
    assert section.blocks == (block,) and 0 not in section.mesh.ranks
    expected = train_in_one_process(path, 9, 4, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", 3, 4, tmp_path / "run")
    assert list(find_differences(found, expected)) == []
    assert_buffers_equal(path, 9, 4, tmp_path / "run" / "saved")


@pytest.mark.gloo
def test_an_evaluation_uses_running_statistics(tmp_path: Path) -> None:
    choices = {"sections": APART, "set": ("images.dp=2", "texts.dp=2", "images.with=texts")}
    options = CompileOptions(cluster="local:2", global_batch=7, whole_batch=("tower",), **choices)
    compile_model(TOWER, options).write_plan(tmp_path / "plan", report_page)
    run = ["--steps", "3", "--eval-every", "3", "--eval-batch", "5", "--workers", "0"]
    run += ["--save", str(tmp_path / "run"), "--log-dir", str(tmp_path)]
    run_plan_ranks(tmp_path / "plan", 2, run)
    user = load_model_file(TOWER)
    model = user.build_model().eval()
    model.load_state_dict(load_full_state_dict(tmp_path / "run"))
    with torch.no_grad():
        expected = model(**user.collate(list(user.call_function("eval_dataset"))))
    found = next(m for m in read_metrics(tmp_path) if "eval" in m)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)


WHITENED = """
import torch
import torch.nn.functional as F
from torch import nn


class Whiten(nn.Module):
    def forward(self, x, mask):
        mean = (x * mask).sum() / mask.sum()
        return (x - mean) * torch.rsqrt(((x - mean) ** 2 * mask).sum() / mask.sum() + 1e-8)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.whiten = nn.Embedding(20, 8), nn.Linear(8, 20), Whiten()

    def forward(self, tokens, mask, advantages):
        nll = F.cross_entropy(self.head(self.embed(tokens)).transpose(1, 2), tokens, reduction="none")
        return (nll * self.whiten(advantages, mask) * mask).sum() / mask.sum()


def model():
    return Policy()


def dataset():
    g = torch.Generator().manual_seed(0)
    made = []
    for i in range(24):
        n = 4 + i % 5
        tokens = torch.randint(0, 20, (n,), generator=g)
        made.append({"tokens": tokens, "advantages": torch.randn(n, generator=g)})
    return made


def collate(samples):
    both = {k: nn.utils.rnn.pad_sequence([s[k] for s in samples], batch_first=True) for k in samples[0]}
    lengths = torch.tensor([len(s["tokens"]) for s in samples])
    return both | {"mask": (torch.arange(int(lengths.max())) < lengths[:, None]).float()}
"""


def test_a_module_without_weights_may_take_the_whole_batch(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(WHITENED)
    with pytest.raises(UserError, match="is applied to a sum over samples") as refused:
        compile_model(tmp_path / "policy.py", CompileOptions())
    assert refused.value.where == "policy.py:10" and "--whole-batch" in refused.value.remedy
    options = CompileOptions(cluster="local:2", global_batch=12, whole_batch=("whiten",))
    plan = check_exactness(compile_model(tmp_path / "policy.py", options), required=True).plan
    assert [s.whole_batch for s in plan.sections if "whiten" in s.blocks] == [True]
    assert any(not s.whole_batch for s in plan.sections)
