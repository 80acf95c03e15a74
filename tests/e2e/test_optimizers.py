"""Optimizers step as in one process. An optimizer that looks at all parameters at once has all of them on
every rank that trains, and plans that say otherwise are refused; options that depend on a parameter's place
among all are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.runtime.model.user_file import load_model_file
from secc.runtime.plan.schema import Plan
from tests.e2e.harness import assert_same_training, compile_and_write, run_plan_ranks
from tests.e2e.reference_runs import MODELS_FOLDER
from tools.train_plain import train_model

MODEL = MODELS_FOLDER / "one_rate_for_all.py"
GLOBAL_BATCH = 12
SECTIONS = ("tower=tower", "text=embed+body+head")


def compile_sections(model: Path, plan: Path, **options: Any) -> Plan:
    return compile_and_write(
        model, plan, cluster="local:2", global_batch=GLOBAL_BATCH, sections=SECTIONS, **options
    ).plan


@pytest.mark.gloo
def test_sections_share_the_ranks_of_a_coupled_optimizer(tmp_path: Path) -> None:
    plan = compile_sections(MODEL, tmp_path / "plan")
    assert [s.name for s in plan.sections] == ["tower", "text"]
    assert len({s.mesh.ranks for s in plan.sections}) == 1
    assert any("every rank that trains has all trained parameters" in n for n in plan.checks["notes"])
    assert_same_training(MODEL, tmp_path, 2, GLOBAL_BATCH)


@pytest.mark.gloo
def test_options_that_depend_on_a_parameters_place_are_those_of_one_process(tmp_path: Path) -> None:
    model, text = tmp_path / "placed.py", MODEL.read_text()
    model.write_text(
        text[: text.index("def optimizer")]
        + "def optimizer(params):\n    params = list(params)\n    groups = [\n"
        "        {'params': [p], 'lr': 0.8 ** (len(params) - i)} for i, (_, p) in enumerate(params)\n    ]\n"
        "    return torch.optim.SGD(groups)\n"
    )
    compile_sections(model, tmp_path / "plan", strategy="apart")
    assert_same_training(model, tmp_path, 2, GLOBAL_BATCH)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (
            {"strategy": "apart"},
            "trained sections tower, text cannot be apart: NormalizedDescent updates",
        ),
        ({"set": ("text.sharding=zero1",)}, "text.sharding=zero1 is impossible: NormalizedDescent is not"),
    ],
)
def test_a_coupled_optimizer_rules_out_parts(options: dict[str, Any], cause: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=cause) as refused:
        compile_sections(MODEL, tmp_path / "plan", **options)
    assert refused.value.remedy


@pytest.mark.gloo
def test_a_rank_with_some_of_the_parameters_refuses_a_coupled_optimizer(tmp_path: Path) -> None:
    """In a plan that was made where the model file chose another one."""
    model, chosen = tmp_path / "one_rate_for_all.py", "import os\n\n\ndef optimizer("
    text = MODEL.read_text().replace("def optimizer(", chosen)
    either = '(NormalizedDescent if "COUPLED" in os.environ else torch.optim.SGD)(['
    model.write_text(text.replace("NormalizedDescent([", either))
    compile_sections(model, tmp_path / "plan", strategy="apart")
    arguments = ["--steps", "1", "--log-dir", str(tmp_path)]
    with pytest.raises(AssertionError, match="NormalizedDescent updates a parameter differently"):
        run_plan_ranks(tmp_path / "plan", 2, arguments, {"COUPLED": "1"})


TEACHER = MODELS_FOLDER / "following_teacher.py"


@pytest.mark.gloo
def test_a_teacher_follows_its_student_where_all_ranks_hold_both(tmp_path: Path) -> None:
    plan = compile_and_write(
        TEACHER, tmp_path / "plan", cluster="local:2", global_batch=GLOBAL_BATCH, strategy="colocate"
    ).plan
    assert {(s.mesh.ranks, s.sharding) for s in plan.sections} == {((0, 1), "none")}
    assert any("uses parameters of the model that it was not given" in n for n in plan.checks["notes"])
    assert_same_training(TEACHER, tmp_path, 2, GLOBAL_BATCH)


def test_sharded_states_are_refused_where_a_hook_reads_the_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sharding=zero1 is impossible: the step of the optimizer uses"):
        compile_and_write(
            TEACHER,
            tmp_path / "plan",
            cluster="local:2",
            global_batch=GLOBAL_BATCH,
            set=("model.sharding=zero1",),
        )


USED = r"a hook of the optimizer uses teacher\.0\.weight.*"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"strategy": "apart"}, "does not hold it"),
        ({"dtype": "bf16"}, "updates a part or a copy of it"),
    ],
)
def test_a_hook_that_uses_weights_which_its_ranks_lack_is_refused_when_the_plan_is_made(
    tmp_path: Path, choice: dict[str, Any], reason: str
) -> None:
    """The teacher's rank has no optimizer, and so no hook."""
    options = CompileOptions(cluster="local:2", global_batch=GLOBAL_BATCH, **choice)
    with pytest.raises(UserError, match=r"a hook of the optimizer uses .*, which it takes") as refused:
        compile_model(TEACHER, options)
    assert reason in refused.value.message and "following_teacher.py:" in refused.value.where


def test_a_hook_that_acts_in_every_40th_step_only_is_refused_when_the_plan_is_made(tmp_path: Path) -> None:
    text = TEACHER.read_text().replace(
        "pairs = zip(",
        "Found.steps += 1\n        if Found.steps % 40:\n            return\n        pairs = zip(",
    )
    path = tmp_path / "seldom.py"
    path.write_text(text.replace("    net: Taught\n", "    net: Taught\n    steps = 0\n"))
    with pytest.raises(UserError, match=USED):
        compile_model(path, CompileOptions(cluster="local:2", global_batch=GLOBAL_BATCH, strategy="apart"))


def test_a_plan_of_no_chosen_strategy_keeps_together_what_a_hook_needs() -> None:
    made = compile_model(TEACHER, CompileOptions(cluster="local:2", global_batch=GLOBAL_BATCH))
    assert len({s.mesh.ranks for s in made.plan.sections}) == 1


def test_the_plain_reference_tells_a_scheduler_the_number_of_steps(tmp_path: Path) -> None:
    (tmp_path / "warm.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.lin = nn.Linear(4, 1)\n"
        "    def forward(self, x):\n        return self.lin(x).square().mean()\n"
        "def model(): return Net()\n"
        "def dataset(): return [{'x': torch.full((4,), float(i))} for i in range(8)]\n"
        "def scheduler(optimizer, steps):\n"
        "    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)\n"
    )
    assert len(train_model(load_model_file(tmp_path / "warm.py"), steps=2, global_batch=4)[1]) == 2
