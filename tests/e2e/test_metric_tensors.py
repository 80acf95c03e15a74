"""Tensors that `metrics()` asks for are those of each sample alone, also where experts are divided over
replicas and where a micro-batch's glue is recorded again on its rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.training.supervisor import run_plan
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks
from tests.e2e.test_rerecording import BRANCH, RARE, READS
from tests.e2e.test_rerecording import SOURCE as READER

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(600)]

EXPERTS = (Path(__file__).parent.parent / "models" / "one_expert.py").read_text()
METRICS = """

def eval_dataset():
    return [dataset()[i] for i in {numbers}]


def metrics(outputs, logits):
    return {{f"sample_{{k}}": float(rows.double().square().mean()) for k, rows in enumerate(logits)}}
"""
EXPERTS_LOSS = "F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)"
READER_LOSS = "F.cross_entropy(self.head(self.decoder(h)), y)"
CASES = [
    pytest.param(
        EXPERTS.replace(
            f"return {EXPERTS_LOSS}",
            f'logits = self.head(x)\n        return {{"loss": {EXPERTS_LOSS}, "logits": logits}}',
        ).replace(") -> torch.Tensor:\n        x = self.embed", "):\n        x = self.embed"),
        (*range(7),),
        ("model.dp=2", "model.ep=2", "model.micro_batch=1"),
        id="experts",
    ),
    pytest.param(
        READER.replace("{read}", READS["item"])
        .replace("{branch}", BRANCH.format("rare"))
        .replace(
            f"return {READER_LOSS}",
            "logits = self.head(self.decoder(h))\n"
            '        return {"loss": F.cross_entropy(logits, y), "logits": logits}',
        ),
        (5, RARE, 6, 7, 9),
        (),
        id="recorded again",
    ),
]


def test_a_tensor_that_recorded_glue_lacks_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The class with the highest score is no part of the loss, so a micro-batch on another branch has none;
    training goes on."""
    source, numbers, _ = CASES[1].values
    path = tmp_path / "model.py"
    best = source.replace('"logits": logits}', '"logits": logits.argmax(-1)}')
    path.write_text(best + METRICS.format(numbers=numbers))
    plan = compile_and_write(path, tmp_path / "plan", cluster="local:1", global_batch=6).plan
    assert [case.spare for case in plan.recorded] == [True]
    assert run_plan(tmp_path / "plan", ["--steps", "1", "--eval-every", "1", "--workers", "0"]) == 2
    errors = capfd.readouterr().err
    assert (
        "metrics() asks for 'logits', which the plan does not compute" in errors and "Traceback" not in errors
    )


@pytest.mark.parametrize(("source", "numbers", "pins"), CASES)
def test_tensors_of_metrics_are_those_of_each_sample_alone(
    source: str, numbers: tuple[int, ...], pins: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(source + METRICS.format(numbers=numbers))
    strategy = {} if "ep" in "".join(pins) else {"strategy": "apart"}
    plan = compile_and_write(
        path, tmp_path / "plan", cluster="local:2", global_batch=6, set=pins, **strategy
    ).plan
    arguments = ["--steps", "2", "--eval-every", "2", "--save", str(tmp_path / "saved"), "--workers", "0"]
    run_plan_ranks(tmp_path / "plan", plan.world_size, [*arguments, "--log-dir", str(tmp_path)])
    user = load_model_file(path)
    model = user.build_model()
    model.load_state_dict(load_full_state_dict(tmp_path / "saved"))
    model.eval()
    (found,) = [line for line in read_metrics(tmp_path) if "eval" in line]
    for k, number in enumerate(numbers):
        with torch.no_grad():
            logits = model(**user.collate([user.load_sample(number)]))["logits"]
        assert found[f"sample_{k}"] == pytest.approx(float(logits.double().square().mean()), rel=1e-5), number
