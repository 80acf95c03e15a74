"""Losses that are functions of sums over the batch are refused without `--global-sums`, and with it are those
of plain PyTorch on the whole batch, in any micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.plan.schema import is_statistic
from tests.e2e.harness import read_metrics, run_plan_ranks
from tests.passes.loss_examples import MODEL as LOSS_MODEL
from tools.compare_training import (
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
MODEL = MODELS / "functions_of_sums.py"


def test_the_message_names_the_option() -> None:
    with pytest.raises(UserError, match="is applied to a sum over samples") as refused:
        compile_model(MODEL, CompileOptions())
    assert "exactly from the sums of the global batch with --global-sums" in refused.value.remedy
    check_exactness(compile_model(MODEL, CompileOptions(global_sums=True)), required=True)


def test_a_sum_that_meets_single_samples_is_refused(tmp_path: Path) -> None:
    source = (
        MODEL.read_text()
        .replace("error.sqrt()", "error")
        .replace(
            "error = F.mse_loss(found, depth)", "error = ((found - depth) / gap.abs().mean()).square().mean()"
        )
    )
    (tmp_path / "normalised.py").write_text(source)
    with pytest.raises(UserError, match="depends on a block's result") as refused:
        compile_model(tmp_path / "normalised.py", CompileOptions(global_sums=True))
    assert (
        "only where it needs no gradient" in refused.value.remedy and "--whole-batch" in refused.value.remedy
    )


@pytest.mark.parametrize("spread", ["(v - v.mean()).square().mean()", "v.var(unbiased=False)"])
def test_a_variance_over_the_batch_is_refused_with_a_spelling_that_is_exact(
    spread: str, tmp_path: Path
) -> None:
    def compile_spread(text: str) -> CompiledPlan:
        body = f"        v = y.mean((1, 2)); return y.square().mean() - 0.1 * ({text})"
        (tmp_path / "spread.py").write_text(LOSS_MODEL.format(body=body))
        return compile_model(tmp_path / "spread.py", CompileOptions("local:2", 8, global_sums=True))

    with pytest.raises(UserError) as refused:
        compile_spread(spread)
    spelling = "x.square().mean() - x.mean().square()"
    assert spelling in refused.value.remedy
    check_exactness(compile_spread(spelling.replace("x", "v")), required=True)
    check_exactness(compile_spread("(v - v.mean().detach()).square().mean()"), required=True)


@pytest.mark.parametrize(
    "penalty",
    [
        "(usage * usage.log()).sum()",
        "(usage / (1 + usage.square().sum())).sum()",
        "usage.log().sum() * usage[0]",
    ],
)
def test_a_sum_times_a_function_of_sums_is_one_itself(penalty: str, tmp_path: Path) -> None:
    """Such as the entropy of how often each code of a codebook is used."""
    text = MODEL.read_text().replace(
        "error = F.mse", "usage = chosen.mean((0, 1)) + 0.1\n        error = F.mse"
    )
    (tmp_path / "usage.py").write_text(text.replace("+ dice + floored", f"+ dice + floored + {penalty}"))
    check_exactness(compile_model(tmp_path / "usage.py", CompileOptions(global_sums=True)), required=True)


def test_a_function_of_sums_that_some_batches_lack_is_refused_with_its_cause(tmp_path: Path) -> None:
    optional = "return ({'seen': torch.randn(6, generator=g)} if i % 2 else {}) | {\n"
    more = "more = 0.0 if seen is None else self.parts(self.encoder(seen)).mean(0).norm()"
    changes = {
        "part: torch.Tensor\n": "part: torch.Tensor, seen: torch.Tensor | None = None\n",
        "error = F.mse": f"{more}\n        error = F.mse",
        "+ dice + floored": "+ dice + floored + more",
        "return {\n": optional,
    }
    text = MODEL.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "seen.py").write_text(text)
    with pytest.raises(UserError, match="of batches with seen only, and counts once for a batch") as refused:
        compile_model(tmp_path / "seen.py", CompileOptions(global_sums=True))
    line = text.splitlines()[int(refused.value.where.rpartition(":")[2]) - 1]
    assert "norm()" in line or "more" in line


VALUES_ONLY = (
    "torch.sigmoid(y.mean((1, 2)) - y.mean((1, 2)).mean().detach()).mean()",
    "-(y.log_softmax(-1) / y.softmax(-1).mean((0, 1)).detach()).mean()",
    "(y.square().mean(1) * t.mean((0, 1)).exp()).mean()",
)


@pytest.mark.parametrize("loss", VALUES_ONLY)
def test_a_sum_without_a_gradient_may_meet_single_samples(loss: str, tmp_path: Path) -> None:
    (tmp_path / "values.py").write_text(LOSS_MODEL.format(body=f"        return {loss}"))
    with pytest.raises(UserError) as refused:
        compile_model(tmp_path / "values.py", CompileOptions("local:2", 8))
    assert "--global-sums" in refused.value.remedy
    options = CompileOptions("local:2", 8, global_sums=True)
    check_exactness(compile_model(tmp_path / "values.py", options), required=True)


NESTED = {
    "preferences, compared with their mean": """
        shift = (y.sum((1, 2)) - t.sum((1, 2))).mean().detach().clamp(min=0)
        return torch.sigmoid(y.mean((1, 2)) - shift).nanmean()
""",
    "values, normalised by mean and deviation": """
        mean = y.mean((1, 2)).mean().detach().clamp(min=-9)
        deviation = (y.mean((1, 2)) - mean).square().mean().sqrt().detach()
        return torch.tanh((y.mean((1, 2)) - mean) / deviation).square().mean()
""",
}


@pytest.mark.parametrize("name", NESTED)
def test_a_sum_that_reads_another_one_is_found_in_a_later_forward(name: str, tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(LOSS_MODEL.format(body=NESTED[name]))
    options = CompileOptions("local:2", 8, global_sums=True)
    compiled = compile_model(tmp_path / "nested.py", options)
    passes = [t.first_pass for t in compiled.plan.terms if is_statistic(t.name)]
    assert max(passes) == len({*passes}) > 1
    check_exactness(compiled, required=True)


TEACHER = """class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30)).requires_grad_(False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.scores(text).argmax(-1).masked_fill(text == 0, IGNORED)
"""


def write_chosen_labels(directory: Path, by_teacher: bool) -> Path:
    """Returns a model with labels that a frozen teacher gives, or a loop over the texts."""
    text = (MODELS / "chosen_labels.py").read_text()
    begin, end = text.index("class Choice"), text.index("\n\nclass Tagger")
    path = directory / ("labels_of_teacher.py" if by_teacher else "labels_of_loop.py")
    path.write_text(text[:begin] + TEACHER + text[end:] if by_teacher else text)
    return path


@pytest.mark.parametrize("by_teacher", [False, True], ids=["loop", "teacher"])
def test_labels_that_inputs_do_not_show_may_be_ignored(by_teacher: bool, tmp_path: Path) -> None:
    model = write_chosen_labels(tmp_path, by_teacher)
    options = CompileOptions(global_batch=12, sections=("choice=choice",) if by_teacher else ())
    with pytest.raises(UserError, match="number of labels that are not ignored") as refused:
        compile_model(model, options)
    assert "--global-sums" in refused.value.remedy
    options = replace(options, global_sums=True)
    check_exactness(compile_model(model, options), required=True)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (3, {"sections": ("encoder=encoder", "heads=depth+parts"), "strategy": "apart"}),
        (2, {"sections": ("model=encoder+depth+parts",), "set": ("model.dp=2", "model.micro_batch=1")}),
        (2, {"sections": ("model=encoder+depth+parts",), "set": ("model.dp=2", "model.sharding=zero3")}),
        (2, {"sections": ("model=encoder+depth+parts",), "set": ("model.dp=2", "model.sharding=zero1")}),
    ],
)
def test_ranks_train_with_functions_of_global_sums(
    ranks: int, choices: dict[str, Any], tmp_path: Path
) -> None:
    path = write_recording_model("functions_of_sums", tmp_path, MODELS)
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=7, global_sums=True, **choices)
    compile_model(path, options).write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, 7, 3, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 3, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("by_teacher", [False, True], ids=["loop", "teacher"])
def test_ranks_count_labels_that_inputs_do_not_show(by_teacher: bool, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = write_chosen_labels(tmp_path / "own", by_teacher)
    path = write_recording_model(own.stem, tmp_path, own.parent)
    options = CompileOptions(
        cluster="local:3",
        global_batch=12,
        global_sums=True,
        sections=("choice=choice",) if by_teacher else (),
    )
    compiled = check_exactness(compile_model(path, options), required=True)
    compiled.write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, 12, 3, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, 3, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


@pytest.mark.slow
@pytest.mark.gloo
def test_an_evaluation_takes_sums_over_its_set(tmp_path: Path) -> None:
    options = CompileOptions(
        cluster="local:2",
        global_batch=6,
        global_sums=True,
        sections=("model=encoder+depth+parts",),
        set=("model.dp=2",),
    )
    compile_model(MODEL, options).write_plan(tmp_path / "plan", report_page)
    run = ["--steps", "2", "--eval-every", "2", "--eval-batch", "5", "--workers", "0"]
    run += ["--save", str(tmp_path / "run"), "--log-dir", str(tmp_path)]
    run_plan_ranks(tmp_path / "plan", 2, run)
    user = load_model_file(MODEL)
    model = user.build_model()
    model.load_state_dict(load_full_state_dict(tmp_path / "run"))
    evaluated = user.call_function("eval_dataset")
    with torch.no_grad():
        expected = model(**user.collate(evaluated))
    found = next(m for m in read_metrics(tmp_path) if "eval" in m)
    assert found["loss"] == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert found["root"] == pytest.approx(float(expected["root"]), rel=1e-6)


WITH_SOUNDS = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.sound = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), nn.Linear(5, 3)

    def forward(self, x, y, sound=None, rows=None):
        out = self.body(x)
        if sound is not None:
            out = out.index_add(0, rows, self.sound(sound))
        return F.mse_loss(out, y).sqrt()


def model():
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    made = [{"x": torch.randn(8, generator=g), "y": torch.randn(3, generator=g)} for _ in range(24)]
    for sample in made[::3]:
        sample["sound"] = torch.randn(5, generator=g)
    return made


def collate(samples):
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("x", "y")}
    if rows := [i for i, s in enumerate(samples) if "sound" in s]:
        batch |= {"sound": torch.stack([samples[i]["sound"] for i in rows]), "rows": torch.tensor(rows)}
    return batch
"""


def test_an_optional_input_may_add_to_what_is_summed(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(WITH_SOUNDS)
    options = CompileOptions(cluster="local:2", global_batch=8, global_sums=True)
    plan = check_exactness(compile_model(tmp_path / "net.py", options), required=True).plan
    assert [len(p["pattern"]) for p in plan.checks["patterns"]] == [0, 2]  # pyright: ignore
    assert len(plan.terms) == 2  # the sum, and the function of it
