"""Conditions that Python reads of a whole batch: micro-batches may decide them separately only if the loss
does not depend on them, or if it takes rows that they pick."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.frontend.capture.batch_decisions import BatchDecisions
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks
from tests.e2e.reference_runs import MODELS_FOLDER
from tools.train_plain import train_model

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 30)

    def forward(self, input_ids, labels):
        x, keep = self.embed(input_ids), labels != -100
        BRANCH
        x = self.mid(x)
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return losses.sum() / keep.sum()


def model():
    return Model()


def dataset():
    made = []
    for i in range(40):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 30, (4 + i % 9,), generator=g)
        made.append({"input_ids": ids, "labels": torch.where(ids < 4, -100, ids)})
    return made
"""
PLACE = "model.py:13"


def compiled(branch: str, tmp_path: Path, global_batch: int = 12) -> CompiledPlan:
    (tmp_path / "model.py").write_text(MODEL.replace("BRANCH", branch))
    return check_exactness(
        compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=global_batch)),
        required=True,
    )


DEPENDS = (
    "x = x * 2 if keep.sum() > 70 else x",
    "x = x * 2 if keep.sum().item() > 70 else x",
    "x = x * 2 if keep.all() else x",
    "x = x * (2 if bool((input_ids == 7).any()) else 1)",
)


@pytest.mark.parametrize(
    "branch",
    [
        "x = x * 2 if len(input_ids) > 8 else x",
        "x = x * 2 if len(x[keep]) > 70 else x",
        "x = x * 2 if len(x[torch.rand(input_ids.shape) < 0.5]) > 45 else x",
    ],
    ids=["samples", "rows", "drawn"],
)
def test_a_loss_that_depends_on_the_size_of_a_batch_is_refused_with_its_line(
    branch: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="decides by the size of a batch: 16 samples") as refused:
        compiled(branch, tmp_path, global_batch=16)
    assert refused.value.where == PLACE


@pytest.mark.parametrize("kept", ["x", "self.seen = [x]; x = self.seen[0]"])
def test_a_size_that_captures_meet_on_both_sides_is_refused_with_its_line(kept: str, tmp_path: Path) -> None:
    """Glue is then recorded again for each micro-batch, also where forward leaves results on the model."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("BRANCH", f"{kept}\n        x = x * 2 if len(x) > 6 else x"))
    made = compile_model(path, CompileOptions(cluster="local:2", global_batch=12))
    with pytest.raises(UserError, match="the glue's ops change with the batch") as error:
        check_exactness(made, required=True)
    assert error.value.where == "model.py:14" and "the number of samples" in error.value.remedy


def test_a_size_that_changes_only_how_the_loss_is_computed_is_exact(tmp_path: Path) -> None:
    plan = compiled("x = x * 2 if len(input_ids) > 8 else x + x", tmp_path, global_batch=16).plan
    assert all(p["exact"] for p in plan.checks["patterns"])


@pytest.mark.parametrize("branch", DEPENDS)
def test_a_loss_that_depends_on_a_whole_batch_condition_is_refused_with_its_line(
    branch: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match="the loss depends on a value that Python reads of the whole batch"
    ) as error:
        compiled(branch, tmp_path)
    assert error.value.where == PLACE and "torch.where" in error.value.remedy


BLOCK = """
class Mid(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, keep):
        return self.linear(x) * FACTOR


class Model("""


@pytest.mark.parametrize(
    ("factor", "refused"),
    [("(2 if keep.sum() > 70 else 1)", True), ("(1 if keep.sum() > 70 else 1.0)", False)],
)
def test_conditions_inside_blocks_are_compared_at_global_batch_size(
    factor: str, refused: bool, tmp_path: Path
) -> None:
    text = MODEL.replace("class Model(", BLOCK.replace("FACTOR", factor)).replace("BRANCH", "pass")
    (tmp_path / "model.py").write_text(
        text.replace("nn.Linear(8, 8), nn.Linear(8, 30)", "Mid(), nn.Linear(8, 30)").replace(
            "mid(x)", "mid(x, keep)"
        )
    )
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))
    if not refused:
        assert check_exactness(made, required=True).plan.checks["patterns"]
        return
    with pytest.raises(
        UserError, match="the loss depends on what a block computes of the whole batch"
    ) as error:
        check_exactness(made, required=True)
    assert error.value.where.endswith("model.py:12")
    assert "mid gives a sample another result when other samples come with it" in error.value.message
    assert "--whole-batch mid, exact" in error.value.remedy
    options = CompileOptions(cluster="local:2", global_batch=12, whole_batch=("mid",))
    check_exactness(compile_model(tmp_path / "model.py", options), required=True)


DELAYS = """
import torch
from torch import nn


class Rolled(nn.Module):
    def forward(self, x):
        delay = int(x.abs().mean((0, 2)).argmax())
        return x.roll(-delay, 1) * torch.linspace(0, 1, x.shape[1])[:, None]


class Half(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.linear, self.rolled, self.share = nn.Linear(8, 8), Rolled(), share

    def forward(self, x):
        return x + self.share * self.rolled(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Half(SHARE), Half(1.0), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.second(self.first(x))).square().mean()


def model():
    return Model()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(16, 8, generator=g)} for _ in range(24)]
"""


@pytest.mark.parametrize("share", ("1.0", "1e-5"))
def test_blocks_that_choose_by_a_mean_of_the_batch_are_named(share: str, tmp_path: Path) -> None:
    """Also one in which the choice changes too little to be seen: it has a part of the same class."""
    (tmp_path / "model.py").write_text(DELAYS.replace("SHARE", share))
    with pytest.raises(UserError) as error:
        check_exactness(
            compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12)),
            required=True,
        )
    assert "first and second give a sample another result" in error.value.message
    assert "--whole-batch first --whole-batch second, exact" in error.value.remedy
    options = CompileOptions(cluster="local:2", global_batch=12, whole_batch=("first", "second"))
    check_exactness(compile_model(tmp_path / "model.py", options), required=True)


PICTURES = """
    def forward(self, input_ids, labels, pictures=None):
        x, keep = self.embed(input_ids), labels != -100
        if pictures is not None:
            x = x.masked_scatter((input_ids == 29)[..., None], self.look(pictures))
"""


def test_a_block_is_compared_once_on_samples_with_and_without_optional_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[tuple[list[str], list[bool]]]()
    find = BatchDecisions.find_differing_batches

    def record(self: BatchDecisions, pattern: frozenset[str]):
        for cause, where, samples in find(self, pattern):
            compared.append((sorted(pattern), ["pictures" in s for s in samples]))
            yield cause, where, samples

    monkeypatch.setattr(BatchDecisions, "find_differing_batches", record)
    head, _, data = MODEL.partition("        losses = ")
    head = head.replace("class Model(", BLOCK.replace("FACTOR", "(1 if keep.sum() > 70 else 1.0)"))
    head = head.replace("nn.Linear(8, 8), nn.Linear(8, 30)", "Mid(), nn.Linear(8, 30)").replace(
        "        self.embed,", "        self.look = nn.Linear(4, 8)\n        self.embed,"
    )
    start = head.rindex("    def forward")
    text = head[:start] + PICTURES[1:] + "        x = self.mid(x, keep)\n        losses = " + data
    text = text.replace("torch.randint(1, 30,", "torch.randint(1, 29,").replace(
        "    return made",
        "        if i % 2:\n"
        "            ids[0] = 29\n"
        "            made[-1]['pictures'] = torch.randn(1, 4, generator=g)\n"
        "    return made",
    )
    (tmp_path / "model.py").write_text(text)
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))
    check_exactness(made, required=True)
    ((pattern, with_pictures),) = compared
    assert pattern == ["pictures"] and with_pictures.count(True) == with_pictures.count(False) == 6


MAKES_NO_DIFFERENCE = (
    "x = x if keep.all() else torch.where((labels == -100)[..., None], x * 1.0, x)",
    "x = x.mul(2) if keep.sum() > 70 else x + x",
    "assert keep.sum() <= labels.numel()",
)


@pytest.mark.parametrize("branch", MAKES_NO_DIFFERENCE)
def test_conditions_that_leave_the_loss_unchanged_are_accepted(branch: str, tmp_path: Path) -> None:
    assert all(p["exact"] for p in compiled(branch, tmp_path).plan.checks["patterns"])


def test_a_threshold_above_the_global_batch_is_accepted(tmp_path: Path) -> None:
    assert compiled(DEPENDS[0], tmp_path, global_batch=4).plan.checks["patterns"]


@pytest.mark.gloo
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_heads_of_tasks_get_the_rows_of_their_samples(micro_batch: int, tmp_path: Path) -> None:
    """Small micro-batches have few samples of each task, often as many of one as of another, or none."""
    _train_and_compare(MODELS_FOLDER / "rows_by_task.py", micro_batch, tmp_path)


@pytest.mark.gloo
def test_the_longest_clip_of_a_batch_is_no_quotient_of_its_frames(tmp_path: Path) -> None:
    """Few small micro-batches let a rounded quotient of the number of frames pass for it."""
    _train_and_compare(MODELS_FOLDER / "padded_clips.py", 3, tmp_path)


def _train_and_compare(model: Path, micro_batch: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    pins = ("model.dp=2", f"model.micro_batch={micro_batch}")
    compile_and_write(model, tmp_path / "plan", cluster="local:2", global_batch=12, set=pins)
    run_plan_ranks(tmp_path / "plan", 2, ["--steps", "3", "--log-dir", str(tmp_path), "--save", str(saved)])
    trained, losses = train_model(load_model_file(model), 3, 12)
    assert [m["loss"] for m in read_metrics(tmp_path)] == pytest.approx(losses, rel=1e-6)
    found = load_full_state_dict(saved)
    for name, expected in trained.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
