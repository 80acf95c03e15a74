"""An evaluation gives what plain PyTorch gives for the whole set as one batch in eval mode, under every kind
of plan; averages of weights are those of a plain loop and survive a resumption under another plan."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.model.user_file import UserModel, extract_loss, load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks

MODELS = Path(__file__).parent.parent / "models"
PATH = MODELS / "evaluated.py"


def evaluate_plainly(user: UserModel, state: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Evaluates each set as one batch."""
    model = user.build_model()
    model.load_state_dict(state)
    model.eval()
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, one in user.call_function("eval_dataset").items():
            batch = user.collate([one[i] for i in range(len(one))])
            output, counted = model(**batch), batch["labels"] != -100
            values = {key: float(value) for key, value in output.items() if not value.ndim}
            f1 = user.module.macro_f1(output["predictions"][counted], batch["labels"][counted])
            found[name] = values | {
                "accuracy": values["right"] / values["count"],
                "perplexity": math.exp(values["ce"]),
                "f1": f1,
                "spread": float(output["pooled"].var(0).sum()),
                "third": float(output["pooled"][2].norm()),
                "pictures": len(batch["picture"]),
                "brightness": float(output["seen"].double().std()),
            }
    return found


def check_evaluations(lines: list[dict[str, Any]], expected: dict[str, dict[str, float]]) -> None:
    assert [line["eval"] for line in lines] == list(expected)
    for line in lines:
        for key, value in expected[line["eval"]].items():
            assert line[key] == pytest.approx(value, rel=1e-6), (line["eval"], key)
        assert line["samples"] == {"short": 5, "long": 23}[line["eval"]] and line["tokens"] == line["count"]


def read_evaluations(directory: Path) -> list[dict[str, Any]]:
    return [m for m in read_metrics(directory) if "eval" in m]


def evaluations(directory: Path, step: int) -> list[dict[str, Any]]:
    return [m for m in read_evaluations(directory) if m["step"] == step]


PLANS = [
    pytest.param(3, ("vision.micro_batch=2", "body.micro_batch=3"), ("--eval-batch", "4"), id="apart"),
    pytest.param(3, ("body.pp=2",), ("--eval-batch", "7"), id="pipeline", marks=pytest.mark.slow),
    pytest.param(3, ("body.tp=2",), ("--comm", "rounds"), id="tensor-parallel", marks=pytest.mark.slow),
    pytest.param(3, ("body.sharding=zero3", "body.dp=2"), (), id="zero3", marks=pytest.mark.slow),
    pytest.param(3, ("body.cp=2",), (), id="context-parallel", marks=pytest.mark.slow),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("ranks", "pins", "options"), PLANS)
def test_an_evaluation_is_that_of_the_whole_set_in_one_batch(
    ranks: int, pins: tuple[str, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    compiled = compile_and_write(
        PATH, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=8, strategy="apart", set=pins
    )
    assert "evaluation" not in compiled.plan.checks
    arguments = [
        "--log-dir",
        str(tmp_path),
        "--workers",
        "0",
        "--save",
        str(tmp_path / "saved"),
        "--steps",
        "2",
    ]
    run_plan_ranks(tmp_path / "plan", compiled.plan.world_size, [*arguments, "--eval-every", "2", *options])
    user = load_model_file(PATH)
    user.use_plan_inputs(compiled.plan.inputs)
    check_evaluations(
        evaluations(tmp_path, 2), evaluate_plainly(user, load_full_state_dict(tmp_path / "saved"))
    )


@pytest.mark.gloo
def test_averaged_weights_are_those_of_a_plain_loop_and_resume_under_another_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(PATH.read_text().replace("DROPOUT = 0.2", "DROPOUT = 0.0"))
    for name, choices in {"one": (), "two": ("body.sharding=zero2", "body.dp=2")}.items():
        compile_and_write(
            path,
            tmp_path / name,
            check=False,
            cluster="local:3",
            global_batch=8,
            strategy="apart",
            set=choices,
        )
    common = ["--workers", "0", "--save", str(tmp_path / "saved"), "--ema", "0.7", "--eval-batch", "6"]
    kept = ["--keep-best", "eval/long_loss", "--eval-every", "1", "--log-dir", str(tmp_path)]
    ranks = {
        name: json.loads((tmp_path / name / "plan.json").read_text())["world_size"] for name in ("one", "two")
    }
    run_plan_ranks(tmp_path / "one", ranks["one"], [*common, *kept, "--steps", "2"])
    resumed = [*common, *kept, "--steps", "4", "--resume", str(tmp_path / "saved")]
    run_plan_ranks(tmp_path / "two", ranks["two"], resumed)

    user = load_model_file(path)
    torch.manual_seed(0)
    model = user.build_model()
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = user.build_optimizer(list(model.named_parameters()))
    for step in range(4):
        optimizer.zero_grad()
        model(**user.collate([user.load_sample(8 * step + i) for i in range(8)]))["loss"].backward()
        optimizer.step()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 1 - 0.7)
    saved = load_full_state_dict(tmp_path / "saved", averaged=True)
    for name, value in average.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)
    assert not torch.equal(saved["head.weight"], load_full_state_dict(tmp_path / "saved")["head.weight"])
    check_evaluations(evaluations(tmp_path, 4), evaluate_plainly(user, saved))
    losses = {m["step"]: m["loss"] for m in read_evaluations(tmp_path) if m["eval"] == "long"}
    best = json.loads((tmp_path / "saved" / "best" / "best.json").read_text())
    assert best["value"] == min(losses.values()) == losses[best["step"]] and list(losses) == [1, 2, 3, 4]
    assert (tmp_path / "saved" / "best" / f"step_{best['step']:08d}").is_dir()

    # `secc eval` of the averages gives the same, on the other plan.
    only = ["--eval-only", "ema", "--resume", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "eval")]
    run_plan_ranks(tmp_path / "one", ranks["one"], [*only, "--workers", "0"])
    check_evaluations(evaluations(tmp_path / "eval", 4), evaluate_plainly(user, saved))


@pytest.mark.gloo
@pytest.mark.slow
def test_training_ends_early_without_a_better_value(tmp_path: Path) -> None:
    text = (
        PATH.read_text()
        + "\n\ndef optimizer(params):\n    return torch.optim.SGD(params, lr=0.1, maximize=True)\n"
    )
    (tmp_path / "model.py").write_text(text)
    compile_and_write(
        tmp_path / "model.py", tmp_path / "plan", check=False, cluster="local:1", global_batch=8
    )
    arguments = [
        "--log-dir",
        str(tmp_path),
        "--workers",
        "0",
        "--save",
        str(tmp_path / "saved"),
        "--steps",
        "20",
    ]
    arguments += ["--eval-every", "2", "--keep-best", "eval/long_loss", "--patience", "2"]
    run_plan_ranks(tmp_path / "plan", 1, arguments)
    assert [m["step"] for m in read_evaluations(tmp_path) if m["eval"] == "long"] == [2, 4, 6]
    assert (tmp_path / "saved" / "step_00000006").is_dir()
    assert json.loads((tmp_path / "saved" / "best" / "best.json").read_text())["step"] == 2


TEACHER = """self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 5)
        self.teacher = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 5)).requires_grad_(False)
"""


@pytest.mark.gloo
@pytest.mark.parametrize("pins", [(), pytest.param(("model.dp=2",), marks=pytest.mark.slow)])
def test_a_set_has_common_widths_if_padding_reaches_the_loss(pins: tuple[str, ...], tmp_path: Path) -> None:
    """Widths of its own: not those of a wider set. Teacher and student are apart, so tensors of that width
    travel."""
    text = (MODELS / "padded_mean.py").read_text()
    text = text.replace(TEACHER.partition("\n")[0] + "\n", TEACHER)
    text = text.replace("logits.square().mean()", "(logits - self.teacher(input_ids)).square().mean()")
    sets = "{'short': Subset(dataset(), SHORT), 'all': dataset()}"
    text += f"\n\nSHORT = [1, 4, 5, 9]\n\n\ndef eval_dataset():\n    return {sets}\n"
    text = text.replace("import Dataset", "import Dataset, Subset")
    (tmp_path / "model.py").write_text(text)
    compiled = compile_and_write(
        tmp_path / "model.py",
        tmp_path / "plan",
        cluster="local:3",
        global_batch=6,
        strategy="apart",
        set=pins,
    )
    assert compiled.plan.widths == "global"
    arguments = ["--log-dir", str(tmp_path), "--workers", "0", "--eval-only", "trained", "--eval-batch", "3"]
    run_plan_ranks(tmp_path / "plan", compiled.plan.world_size, arguments)
    user = load_model_file(tmp_path / "model.py")
    torch.manual_seed(0)
    model = user.build_model().eval()
    expected: dict[str, float] = {}
    with torch.no_grad():
        for name, one in user.call_function("eval_dataset").items():
            batch = user.collate([one[i] for i in range(len(one))])
            expected[name] = float(extract_loss(model(**batch)))
    found = {line["eval"]: line["loss"] for line in read_evaluations(tmp_path)}
    assert found == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_a_forward_that_does_something_else_in_eval_mode_cannot_be_evaluated(tmp_path: Path) -> None:
    text = PATH.read_text().replace(
        "logits = self.head(hidden)", "logits = self.head(hidden * (2.0 if self.training else 1.0))"
    )
    (tmp_path / "model.py").write_text(text)
    compiled = check_exactness(compile_model(tmp_path / "model.py", CompileOptions(global_batch=8)))
    assert "self.training" in str(compiled.plan.checks["evaluation"])


TENSORS = [
    pytest.param("logits", "", "metrics() asks for 'logits', which is no tensor", id="not returned"),
    pytest.param("weight", '"weight": self.head.weight', "head.weight, which has no rows", id="no rows"),
    pytest.param(
        "right", "", "metrics() asks for 'right', which is no tensor", id="scalar", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("name", "returned", "message"), TENSORS)
def test_a_tensor_that_metrics_cannot_have_is_refused(
    name: str, returned: str, message: str, tmp_path: Path
) -> None:
    text = PATH.read_text().replace("labels: list[torch.Tensor],", f"{name}: list[torch.Tensor],")
    (tmp_path / "model.py").write_text(text.replace('"pooled": pooled}', f'"pooled": pooled, {returned}}}'))
    with pytest.raises(UserError) as refused:
        compile_model(tmp_path / "model.py", CompileOptions(global_batch=8))
    assert message in refused.value.message
    assert refused.value.remedy and "model.py:" in refused.value.where


@pytest.mark.slow
def test_a_tensor_that_depends_on_padding_needs_global_widths(tmp_path: Path) -> None:
    exact = "pooled = (hidden * counted).sum(1) / counted.sum(1)"
    text = PATH.read_text().replace(exact, "pooled = hidden.mean(1)")
    (tmp_path / "model.py").write_text(text)
    for widths, reason in {"auto": "'pooled', which metrics() asks for", "global": "None"}.items():
        options = CompileOptions(global_batch=8, widths=widths)
        compiled = check_exactness(compile_model(tmp_path / "model.py", options))
        assert reason in str(compiled.plan.checks.get("evaluation"))
