"""Tensors that `metrics()` asks for are those of each sample alone, also where experts are divided over
replicas and where a micro-batch's glue is recorded again on its rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
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


def reader(logits: str) -> str:
    """The source of a model whose `logits` are an expression of what its head or its probe returns, and that
    logs two scalars. Sample `RARE` takes a branch that no capture saw."""
    source = READER.replace("{read}", READS["item"]).replace("{branch}", BRANCH.format("rare"))
    source = source.replace(
        "self.head = nn.Linear(8, 5)", "self.head, self.probe = nn.Linear(8, 5), nn.Linear(8, 3)"
    )
    returned = f"""d = self.decoder(h)
        scores = self.head(d)
        right = (scores.argmax(-1) == y).sum()
        size = scores.square().sum(-1).mean()
        return {{"loss": F.cross_entropy(scores, y), "logits": {logits}, "right": right, "size": size}}"""
    return source.replace(f"return {READER_LOSS}", returned)


READER_SAMPLES = (5, RARE, 6, 7, 9)
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
    pytest.param(reader("scores"), READER_SAMPLES, (), id="recorded again"),
    pytest.param(reader("scores.argmax(-1)"), READER_SAMPLES, (), id="an op of the glue"),
    pytest.param(reader("self.probe(d)"), READER_SAMPLES, (), id="a block for metrics alone"),
]


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
    assert [case.spare for case in plan.recorded] == [True] * ("probe" in source)
    (found,) = [line for line in read_metrics(tmp_path) if "eval" in line]
    scalars = {name: 0.0 for name in ("right", "size") if name in found}
    for k, number in enumerate(numbers):
        with torch.no_grad():
            returned = model(**user.collate([user.load_sample(number)]))
        size = float(returned["logits"].double().square().mean())
        assert found[f"sample_{k}"] == pytest.approx(size, rel=1e-5), number
        scalars = {name: total + float(returned[name]) for name, total in scalars.items()}
    if scalars:
        means = {"right": scalars["right"], "size": scalars["size"] / len(numbers)}
        assert {name: found[name] for name in means} == pytest.approx(means, rel=1e-5)
