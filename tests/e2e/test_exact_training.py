"""Training a plan computes what plain PyTorch computes: every step's loss, the first step's gradients, and
the parameters after five steps.

These plans use fused operators; plans of other test files do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.model.user_file import load_model_file
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, GLOBAL_BATCH = 5, 12

# The allocation may leave ranks of such small models idle; where a strategy is named, all of them are wanted.
CASES = [
    ("llava_tiny", 3, "apart"),
    ("padded_mean", 3, "colocate"),
    ("autograd_functions", 2, "apart"),
    ("own_cross_entropy", 2, "apart"),
    ("filled_caches", 2, "apart"),
    ("cached_layers", 2, "apart"),
]
SLOW = [
    ("whisper_tiny", 2, "auto"),
    ("qwen_distil", 2, "apart"),
    ("llava_tiny", 2, "auto"),
    ("two_modalities", 3, "auto"),
    ("two_modalities", 4, "colocate"),
    ("qwen_distil", 4, "auto"),
    ("internvl_tiny", 3, "apart"),
    ("vlm_digits", 3, "apart"),
    ("vlm_digits", 2, "colocate"),
    ("vlm_digits", 4, "apart"),
    ("llava_tiny", 4, "apart"),
    ("two_modalities", 2, "colocate"),
    ("qwen_distil", 3, "colocate"),
    ("whisper_tiny", 4, "apart"),
    ("internvl_tiny", 4, "colocate"),
    ("late_fusion", 3, "apart"),
    ("picture_tokens", 2, "apart"),
]


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("late_fusion", {"loss"}),
        ("picture_tokens", {"cross_entropy", "loss", "ignored_labels"}),
    ],
)
def test_a_term_is_the_same_for_samples_without_an_input(name: str, terms: set[str]) -> None:
    """A tower is behind the loss of batches with pictures alone."""
    made = compile_model(MODELS / f"{name}.py", CompileOptions(cluster="local:2", global_batch=12))
    assert check_exactness(made, required=True).plan.checks["patterns"]
    assert {t.name for t in made.plan.terms} == terms


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "strategy"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]
)
def test_plan_trains_as_plain_pytorch(name: str, ranks: int, strategy: str, tmp_path: Path) -> None:
    model = write_recording_model(name, tmp_path, EXAMPLES if (EXAMPLES / f"{name}.py").exists() else MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compile_and_write(
        model,
        tmp_path / "plan",
        cluster=f"local:{ranks}",
        global_batch=GLOBAL_BATCH,
        strategy=strategy,
        fuse=True,
    )
    found = train_distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


def test_a_mean_that_a_function_takes_of_all_samples_is_refused(tmp_path: Path) -> None:
    source = (MODELS / "own_cross_entropy.py").read_text()
    source = source.replace("return name, total, labels", "return name, total / len(hidden), labels")
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(UserError, match="ChunkedCrossEntropy makes one value of all samples") as error:
        compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))
    assert error.value.where == "model.py:42" and "return a sum over the samples" in (
        error.value.remedy or ""
    )


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/distill_text.py with a teacher of random weights."""
    directory = tmp_path_factory.mktemp("taught")
    teacher = directory / "teacher.safetensors"
    model = write_recording_model("distill_text", directory, EXAMPLES)
    model.write_text(f"import os\n\nos.environ['DISTILL_TEACHER'] = {str(teacher)!r}\n" + model.read_text())
    torch.manual_seed(1)
    save_file(dict(load_model_file(model).module.teacher().named_parameters()), teacher)
    return model


@pytest.mark.gloo
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_distillation_trains_as_plain_pytorch(taught: Path, ranks: int, tmp_path: Path) -> None:
    reference = train_in_one_process(taught, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compile_and_write(
        taught,
        tmp_path / "plan",
        cluster=f"local:{ranks}",
        global_batch=GLOBAL_BATCH,
        strategy="apart",
        fuse=True,
    )
    assert (
        list(
            find_differences(train_distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run"), reference)
        )
        == []
    )


CANCELS = """
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 6))

    def forward(self, x, gain):
        found = self.net(x).log_softmax(-1)
        ratio = torch.exp(found - found.detach())
        return (ratio * gain[..., None]).mean()


def model():
    return Policy()


def dataset():
    made = []
    for i in range(40):
        gain = torch.randn(4, generator=torch.Generator().manual_seed(i))
        g = torch.Generator().manual_seed(i)
        made.append({"x": torch.randn(4, 8, generator=g), "gain": gain - gain.mean()})
    return made
"""


def test_a_loss_whose_terms_cancel_is_compared_in_float64(tmp_path: Path) -> None:
    """Advantages of a group add up to 0, and so does the loss, but for rounding."""
    (tmp_path / "model.py").write_text(CANCELS)
    assert check_exactness(
        compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12)),
        required=True,
    )
