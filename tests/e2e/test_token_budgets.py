"""Micro-batches limited by tokens, or by more short samples than mean ones: plans know the limit, keep to it,
and train as plain PyTorch does."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.replan_from_run import plan_pins
from secc.errors import UserError
from tests.e2e.harness import compile_and_write, find_differences, train_distributed, train_in_one_process
from tests.e2e.reference_runs import write_named_recording_model

GLOBAL_BATCH = 8


def test_the_solver_prices_as_many_mean_samples_as_the_budget_holds(tmp_path: Path) -> None:
    path, memory = write_named_recording_model("llama", tmp_path), list[float]()
    for tokens in (40, 160):
        pins = ("model.dp=2", f"model.micro_batch_tokens={tokens}")
        plan = compile_model(path, CompileOptions(cluster="local:2", global_batch=16, set=pins)).plan
        (section,) = plan.sections
        assert (section.micro_batch, section.micro_batch_tokens) == (8, tokens)
        assert section.token_count == "(B)*(S)"
        assert {"model.micro_batch=8", f"model.micro_batch_tokens={tokens}"} <= {*plan_pins(plan)}
        memory.append(section.memory_gib)
    assert memory[0] < memory[1]  # of a micro-batch with four times the tokens


def test_memory_is_counted_for_mean_samples_where_more_short_ones_may_be_together(tmp_path: Path) -> None:
    path, working = write_named_recording_model("llama", tmp_path), list[int]()
    for pins in (("micro_batch=1",), ("micro_batch=1", "most_samples=4"), ("micro_batch=4",)):
        texts = ("model.dp=2", *(f"model.{pin}" for pin in pins))
        plan = compile_model(path, CompileOptions(cluster="local:2", global_batch=16, set=texts)).plan
        (section,) = plan.sections
        assert set(texts) <= {*plan_pins(plan)}
        expected = (4, 1) if "most_samples=4" in pins else (int(pins[0][-1]), 0)
        assert (section.micro_batch, section.mean_samples) == expected
        working.append(section.working_bytes)
    assert working[0] < working[1] == working[2]


def test_models_without_texts_have_no_token_budget(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x, labels):\n"
        "        return torch.nn.functional.cross_entropy(super().forward(x), labels)\n"
        "def model():\n    return Net(4, 3)\n"
        "def dataset():\n    return [{'x': torch.ones(4), 'labels': i % 3} for i in range(8)]\n"
    )
    options = CompileOptions(cluster="local:1", global_batch=4, set=("model.micro_batch_tokens=64",))
    with pytest.raises(UserError, match="samples have no texts to count") as refused:
        compile_model(path, options)
    assert "micro_batch" in refused.value.remedy


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "pack", "pins"),
    [
        ("llama", 2, "never", "model.dp=2 model.micro_batch_tokens=60"),
        ("gemma3_text", 2, "always", "model.pp=2 model.micro_batch_tokens=45"),
        ("llama", 2, "always", "model.dp=2 model.micro_batch_tokens=50 model.sharding=zero3"),
        ("llama", 2, "never", "model.pp=2 model.micro_batch=1 model.most_samples=4"),
        ("gemma3_text", 2, "always", "model.dp=2 model.micro_batch=1 model.most_samples=4"),
    ],
)
def test_plans_with_token_budgets_train_as_plain_pytorch(
    name: str, ranks: int, pack: str, pins: str, tmp_path: Path
) -> None:
    path = write_named_recording_model(name, tmp_path)
    options = {"cluster": f"local:{ranks}", "global_batch": GLOBAL_BATCH, "set": tuple(pins.split())}
    compile_and_write(path, tmp_path / "plan", pack=pack, **options)
    expected = train_in_one_process(path, GLOBAL_BATCH, 2, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", ranks, 2, tmp_path / "run")
    assert list(find_differences(found, expected)) == []
