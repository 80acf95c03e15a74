"""State that modules keep between calls is refused, with its line, if it couples micro-batches, and
accepted if it does not. Parameters that forward freezes for some calls are frozen for these in a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks
from tests.e2e.reference_runs import MODELS_FOLDER
from tools.train_plain import train_model

MOVING_MEAN = """class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean) * self.weight


"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

{part}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = Part(), nn.Linear(8, 3)

    def forward(self, ids, label):
        return F.cross_entropy(self.head(self.part(ids).float()), label)


def model():
    return Model()


def dataset():
    return [dict(ids=torch.randint(0, 5, (4,)), label=torch.tensor(i % 3)) for i in range(12)]
"""
FREQUENT = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8, scale_grad_by_freq=True)

    def forward(self, ids):
        return self.table(ids).sum(1)
"""
STATISTICS = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, ids):
        found = self.table(ids).sum(1)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(found.mean(0), alpha=0.1)
        return found - self.mean
"""
REPLACED = STATISTICS.replace(
    "self.mean.mul_(0.9).add_(found.mean(0), alpha=0.1)", "self.mean = 0.9 * self.mean + 0.1 * found.mean(0)"
)
COUNTED = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        self.calls += 1
        return self.table(ids).sum(1)
"""
FROZEN_IN_16_BITS = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8).bfloat16().requires_grad_(False)

    def forward(self, ids):
        return self.table(ids).sum(1)
"""
WEIGHT_NORM = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.map = nn.Embedding(5, 8), nn.utils.weight_norm(nn.Linear(8, 8))

    def forward(self, ids):
        return self.map(self.table(ids).sum(1))
"""
ADAPTED = """
ADAPTED = True


class Part(nn.Module):
    adapted = True

    def __init__(self):
        super().__init__()
        self.table, self.adapter = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, ids):
        rows = self.table(ids).sum(1)
        return rows + self.adapter(rows) if SWITCH else rows
"""
COMPARED = """
        global ADAPTED
        SWITCH = False
        plain = self.part(ids)
        SWITCH = True
        return F.cross_entropy(self.head((self.part(ids) - 0.5 * plain).float()), label)
"""
COUPLED = {
    "gradients by frequency": (FREQUENT, r"how often a row is looked up"),
    "renormalised rows": (
        FREQUENT.replace("scale_grad_by_freq=True", "max_norm=1.0"),
        r"depending on its inputs \(part\.table\.weight\)",
    ),
    "statistics": (STATISTICS, r"forward changes depending on its inputs \(part\.mean\)"),
    "statistics in a new tensor": (REPLACED, r"forward changes depending on its inputs \(mean\)"),
}


def written(tmp_path: Path, part: str) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(part=part))
    return path


@pytest.mark.parametrize("name", COUPLED)
def test_module_state_that_couples_micro_batches_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    part, message = COUPLED[name]
    with pytest.raises(UserError, match=message) as found:
        compile_model(written(tmp_path, part), CompileOptions(cluster="local:2", global_batch=4))
    assert found.value.where.startswith("model.py:") and found.value.remedy


@pytest.mark.parametrize("switch", ["ADAPTED", "Part.adapted"])
def test_a_switch_outside_of_modules_is_refused_by_its_name(tmp_path: Path, switch: str) -> None:
    path = written(tmp_path, ADAPTED)
    loss = "        return F.cross_entropy(self.head(self.part(ids).float()), label)\n"
    path.write_text(path.read_text().replace(loss, COMPARED).replace("SWITCH", switch))
    message = f"forward switches {switch}, .* from False to True"
    with pytest.raises(UserError, match=message) as found:
        check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=4)))
    assert found.value.where.startswith("model.py:")


@pytest.mark.parametrize("part", [COUNTED, FROZEN_IN_16_BITS, WEIGHT_NORM])
def test_module_state_that_couples_nothing_is_exact(tmp_path: Path, part: str) -> None:
    compiled = compile_and_write(
        written(tmp_path, part),
        tmp_path / "plan",
        cluster="local:2",
        global_batch=4,
        strategy="apart",
        sections=("part=part",),
    )
    assert [p["exact"] for p in compiled.plan.checks["patterns"]] == [True]


def test_the_message_names_all_blocks_that_couple_samples(tmp_path: Path) -> None:
    source = (MODELS_FOLDER / "batchnorm.py").read_text()
    source = source.replace("class Classifier", MOVING_MEAN + "class Classifier", 1)
    source = source.replace("self.norm = nn.BatchNorm1d(16)", "self.norm, self.other = Centred(), Centred()")
    (tmp_path / "model.py").write_text(
        source.replace("self.norm(self.inner(x))", "self.other(self.norm(self.inner(x)))")
    )
    with pytest.raises(UserError, match="couples the samples of a batch") as refused:
        compile_model(tmp_path / "model.py", CompileOptions())
    assert "--whole-batch norm --whole-batch other, exact: each then computes" in refused.value.remedy


@pytest.mark.gloo
@pytest.mark.parametrize("options", [(), ("model.recompute=full",), ("model.sharding=zero3",)])
def test_a_critic_is_frozen_for_the_calls_for_which_forward_freezes_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    model, saved = MODELS_FOLDER / "frozen_critic.py", tmp_path / "saved"
    compile_and_write(
        model, tmp_path / "plan", cluster="local:2", global_batch=8, set=("model.dp=2", *options)
    )
    run_plan_ranks(tmp_path / "plan", 2, ["--steps", "3", "--log-dir", str(tmp_path), "--save", str(saved)])
    trained, losses = train_model(load_model_file(model), 3, 8)
    assert [m["loss"] for m in read_metrics(tmp_path)] == pytest.approx(losses, rel=1e-6)
    found = load_full_state_dict(saved)
    for name, expected in trained.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gloo
@pytest.mark.parametrize("options", [(), ("model.pp=2",)])
def test_what_a_module_remembers_for_its_next_call_reaches_other_ranks(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    model = MODELS_FOLDER / "remembered_scale.py"
    plan = compile_and_write(model, tmp_path / "plan", cluster="local:2", global_batch=8, set=options).plan
    assert [p["exact"] for p in plan.checks["patterns"]] == [True]
    (note,) = plan.checks["notes"]
    assert "scale: its parts are blocks, because it keeps a tensor on itself in one call and uses" in note
    run_plan_ranks(tmp_path / "plan", plan.world_size, ["--steps", "3", "--log-dir", str(tmp_path)])
    _, losses = train_model(load_model_file(model), 3, 8)
    assert [m["loss"] for m in read_metrics(tmp_path)] == pytest.approx(losses, rel=1e-6)


def test_stages_do_not_part_the_calls_of_a_block_that_remembers_a_tensor(tmp_path: Path) -> None:
    """With a hook on its gradients, the module cannot be opened."""
    source, layers = (MODELS_FOLDER / "remembered_scale.py").read_text(), "self.layers = nn.ModuleList("
    hook = "self.scale.register_full_backward_pre_hook(lambda module, grads: grads)"
    model = tmp_path / "hooked_scale.py"
    model.write_text(source.replace(layers, f"{hook}\n        {layers}"))
    plan = compile_and_write(model, tmp_path / "plan", cluster="local:2", global_batch=8).plan
    assert [p["exact"] for p in plan.checks["patterns"]] == [True]
    assert any("layers.3" in s.blocks for s in plan.sections)  # no larger block hides its calls
    with pytest.raises(UserError, match=r"scale keeps a tensor on itself in one call and uses it") as refused:
        compile_model(model, CompileOptions(cluster="local:2", global_batch=8, set=("model.pp=2",)))
    assert refused.value.where.startswith("hooked_scale.py:") and "leave out model.pp" in refused.value.remedy
