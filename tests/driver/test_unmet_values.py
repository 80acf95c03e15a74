"""What a block does for a value that no compared sample has is compared with plain PyTorch, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from secc.driver import exactness_check
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.unmet_values import (
    AskedNumber,
    ComparisonWatch,
    inputs_of_blocks,
    inputs_of_own_blocks,
    iter_unmet_values,
    unmet_value,
    whole_numbers,
)
from secc.errors import InexactPlan, UserError
from secc.frontend.capture.capture import CapturedCase
from secc.frontend.capture.generalize import GenericGraph
from secc.frontend.dataset.survey import DatasetSurvey, DrawnSample
from secc.runtime.training.eager_reference import LossAndGradients
from secc.runtime.training.one_rank_plan import OneRankPlan
from tests.models import unmet_task

MODEL = Path(unmet_task.__file__)


def check(path: Path, whole_batch: tuple[str, ...] = ()) -> CompiledPlan:
    made = compile_model(path, CompileOptions(cluster="local:2", global_batch=8, whole_batch=whole_batch))
    return check_exactness(made, required=True)


def test_a_task_that_no_drawn_sample_has_is_compared() -> None:
    with pytest.raises(InexactPlan, match=r"where 'task' is 7, which this line asks for") as refused:
        check(MODEL)
    assert "unmet_task.py:" in refused.value.where
    assert "--whole-batch blocks.0 --whole-batch blocks.1" in refused.value.remedy


def test_the_named_remedy_is_exact_at_the_widths_that_the_value_needs() -> None:
    made = check(MODEL, whole_batch=("blocks",))
    assert all(p["exact"] for p in made.plan.checks["patterns"])
    assert made.plan.widths == "global"  # the mean takes padded positions along


def test_a_task_that_python_reads_is_compared(tmp_path: Path) -> None:
    text = MODEL.read_text().replace("[nn.Module] = Centered", "[nn.Module] = ReadCentered")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(InexactPlan, match=r"where 'task' is 7, which this line asks for"):
        check(tmp_path / "model.py")


RARE = "(conditions[0] == RARE_TASK).any()"
LARGE = "conditions[0] + 1000"


@pytest.mark.parametrize(
    "condition",
    [
        "any({7: True}.get(int(task), False) for task in conditions[0])",
        "any(int(task) % 4 == 3 and int(task) > 3 for task in conditions[0])",
        "((conditions[0] - 7.0).abs() < 0.5).any()",
        f"torch.isin({LARGE}, torch.tensor([1007, 1009])).any()",
        f"{{1007, 1009}} & set(({LARGE}).tolist())",
    ],
)
def test_a_task_that_code_finds_in_another_way_is_compared(tmp_path: Path, condition: str) -> None:
    text = MODEL.read_text().replace(RARE, condition)
    if LARGE in condition:
        text = text.replace(LARGE, "conditions[0]").replace("else i % 5", "else 1000 + i % 5")
    assert RARE not in text
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(InexactPlan, match=r"where 'task' is (7|1007|1009), which .*no compared sample has"):
        check(tmp_path / "model.py")


RARE_IDS = """
import bisect
import enum
import functools

import numpy as np

BASE, IDS = 1000, frozenset(range(1207, 1500))
NAMES = {i: "rare" if i >= 1207 else "" for i in range(1000, 1400)}
HANDLERS = {f"task_{i}": i for i in (1000, 1001, 1002, 1003, 1004, 1207)}


class Ids(enum.IntEnum):
    RARE = 1207


def is_rare(task):
    match int(task):
        case Ids.RARE:
            return True
        case _:
            return False


@functools.lru_cache
def is_cached_rare(number):
    return number == BASE + 207


MEMO = {}


def is_memorized_rare(number, known={}):
    if number not in known:
        known[number] = number == BASE + 207
    return known[number]


def remember(function):
    results = {}

    def look_up(number):
        if number not in results:
            results[number] = function(number)
        return results[number]

    return look_up


@remember
def is_remembered_rare(number):
    return number == BASE + 207


class Kinds:
    @functools.cache
    def is_rare(self, number):
        return number - BASE == 207


KINDS = Kinds()


class Centered("""


@pytest.mark.parametrize(
    "condition",
    [
        "any(int(t) == BASE + 207 for t in conditions[0])",
        "any(t.item() - 5 == BASE + 202 for t in conditions[0])",
        "any(int(t - 5) * 2 == 2 * BASE + 404 for t in conditions[0])",
        "((conditions[0] - 100) == BASE + 107).any()",
        "any(int(t) in IDS for t in conditions[0])",
        "any(NAMES.get(int(t)) for t in conditions[0])",
        "any(bisect.bisect([BASE + 207], t) for t in conditions[0].tolist())",
        "any(int(t) // 100 == 12 for t in conditions[0])",
        "any(is_rare(t) for t in conditions[0])",
        "any(HANDLERS[f'task_{int(t)}'] >= BASE + 207 for t in conditions[0])",
        "any((int(t) >> 3) & 31 == int(BASE / 500) + 28 for t in conditions[0])",
        "any((int(t) * 7 + 5) % 64 + 1145 in IDS for t in conditions[0])",
        "any(is_cached_rare(int(t)) for t in conditions[0])",
        "any([KINDS.is_rare(t) for t in conditions[0].tolist()])",
        "int(conditions[0].max()) > BASE + 206",
        "any([MEMO.setdefault(int(t), int(t) == BASE + 207) for t in conditions[0]])",
        "any([is_memorized_rare(int(t)) for t in conditions[0]])",
        "any([is_remembered_rare(t) for t in conditions[0].tolist()])",
        "(conditions[0] + 5 == BASE + 500).all() or (conditions[0] == BASE + 500).any()",
        "(conditions[0].numpy() == BASE + 207).any()",
        "(BASE + 207 <= conditions[0].cpu().numpy()).any()",
        "(np.asarray(conditions[0]) - 7 == BASE + 200).any()",
        "np.isin(conditions[0].numpy(), [BASE + 207, BASE + 208]).any()",
        "any(t in IDS for t in conditions[0].numpy())",
        "any(int(t) - BASE == 207 for t in conditions[0].numpy())",
        "any(f'task_{t}' == f'task_{BASE + 207}' or t > BASE + 206 for t in conditions[0].numpy())",
        "np.searchsorted(np.array([BASE + 207]), conditions[0].numpy(), side='right').any()",
        "(conditions[0].numpy() % 1024 // 8 == 22).any()",
        "any(t == BASE + 207 for t in conditions[0].numpy().tolist())",
        "(conditions[0][:, None] == torch.tensor([BASE + 207, BASE + 208])).any()",
    ],
)
def test_a_task_with_a_large_number_is_compared_whatever_it_is_computed_from(
    tmp_path: Path, condition: str
) -> None:
    text = MODEL.read_text().replace(RARE, condition).replace("else i % 5", "else 1000 + i % 5")
    text = text.replace("\nclass Centered(", RARE_IDS).replace("RARE_TASK if", "1207 if")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(InexactPlan, match=r"where 'task' is -?\d{3,4}, which .*no compared sample has"):
        check(tmp_path / "model.py")


def test_a_task_with_a_weight_for_the_mean_of_the_batch_is_compared(tmp_path: Path) -> None:
    old = f"if {RARE}:\n            y = y - y.mean(0, keepdim=True)"
    new = "y = y - (conditions[0] - 5).clamp(min=0).float().mean() * y.mean(0, keepdim=True)"
    text = MODEL.read_text().replace(old, new)
    assert new in text
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(InexactPlan, match=r"where 'task' is 6, which no compared sample has"):
        check(tmp_path / "model.py")


FUNCTION = """
def center(y, task):
    if y.isnan().any():
        raise ValueError("not a number")
    if any(int(t) == RARE_TASK for t in task):
        y = y - y.mean(0, keepdim=True)
    return y


class TaggedReader"""


def test_a_task_that_a_function_between_modules_reads_is_compared(tmp_path: Path) -> None:
    text = MODEL.read_text().replace("\nclass TaggedReader", FUNCTION).replace(RARE, "False")
    text = text.replace("        return F.cross", "        x = center(x, task)\n        return F.cross")
    text = text.replace("RARE_TASK = 7", "RARE_TASK = 1007").replace("else i % 5", "else 1000 + i % 5")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(InexactPlan, match=r"where 'task' is 1007, which this line asks for"):
        check(tmp_path / "model.py")


HEATED = """
class Heat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, heat: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return heat * self.scale if float(task.float().std()) > 3.0 else heat


class TaggedReader"""


def test_a_temperature_that_a_block_returns_as_it_is_in_all_captures_is_a_result(tmp_path: Path) -> None:
    text = MODEL.read_text().replace("\nclass TaggedReader", HEATED).replace(RARE, "False")
    text = text.replace(
        "self.embed, self.head =",
        "self.cold, self.heat = nn.Parameter(torch.ones(())), Heat()\n        self.embed, self.head =",
    )
    text = text.replace("self.head(x)", "(self.heat(self.cold.exp(), task) * self.head(x))")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(UserError, match="heat reduces its samples to a value that is the whole batch's"):
        check(tmp_path / "model.py")


DAMPED = """
class Damp(nn.Module):
    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        if loss.isnan().item():
            raise ValueError("not a number")
        BRANCH
        return loss


class TaggedReader"""


@pytest.mark.parametrize("branch", ["if loss.item() > 100: loss = 0.1 * loss", "print(float(loss) > 100)"])
def test_a_bound_of_the_loss_that_no_capture_meets_makes_a_block_of_it_a_result(
    tmp_path: Path, branch: str
) -> None:
    """A loss so far that a block returns whatever its value is no part of the block."""
    text = MODEL.read_text().replace("\nclass TaggedReader", DAMPED.replace("BRANCH", branch))
    text = text.replace(RARE, "False").replace(
        "self.embed, self.head =", "self.damp = Damp()\n        self.embed, self.head ="
    )
    text = text.replace("return F.cross", "return self.damp(F.cross").replace(
        "ignore_index=-100)", "ignore_index=-100))"
    )
    (tmp_path / "model.py").write_text(text)
    if branch.startswith("print"):
        check(tmp_path / "model.py")
    else:
        with pytest.raises(UserError, match="damp takes a value that depends on all samples"):
            check(tmp_path / "model.py")


def test_a_drawn_task_that_is_not_among_the_compared_samples_is_tried_first() -> None:
    samples = [{"task": torch.tensor(i)} for i in (0, 1)]
    drawn = tuple(
        DrawnSample(i, {"task": (1,)}, frozenset(), None, flags=frozenset({("task", i)}))
        for i in (0, 1, 2000)
    )
    survey = DatasetSurvey(drawn, frozenset({"task"}), frozenset())
    tried = whole_numbers(survey, samples, [AskedNumber("net.py:3", "eq", 500, is_whole=True)])["task"]
    assert tried[:4] == [2000, 500, 2, 3]


def test_numbers_that_are_lengths_of_other_inputs_keep_their_values() -> None:
    lengths = (4, 5, 9)
    drawn = tuple(
        DrawnSample(i, {"x": (1, n), "n": (1,)}, frozenset(), None, flags=frozenset({("n", n)}))
        for i, n in enumerate(lengths)
    )
    survey = DatasetSurvey(drawn, frozenset({"x", "n"}), frozenset())
    samples = [{"x": torch.zeros(n), "n": torch.tensor(n)} for n in lengths]
    assert not whole_numbers(survey, samples, [])


def test_a_flag_that_no_drawn_sample_has_is_compared(tmp_path: Path) -> None:
    text = MODEL.read_text().replace("(conditions[0] == RARE_TASK).any()", "conditions[0].any()")
    text = text.replace("torch.tensor(RARE_TASK if i == 2987 else i % 5)", "torch.tensor(i == 2987)")
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(InexactPlan, match=r"where 'task' is 1, which this line asks for"):
        check(tmp_path / "model.py")


def test_a_value_that_only_its_sample_depends_on_is_exact(tmp_path: Path) -> None:
    old = "if (conditions[0] == RARE_TASK).any():\n            y = y - y.mean(0, keepdim=True)"
    new = "y = torch.where((conditions[0] == RARE_TASK)[:, None, None], -y, y)"
    text = MODEL.read_text().replace(old, new)
    assert new in text
    (tmp_path / "model.py").write_text(text)
    assert all(p["exact"] for p in check(tmp_path / "model.py").plan.checks["patterns"])


def test_only_answers_that_are_missing_are_tried() -> None:
    model = unmet_task.TaggedReader()
    samples = unmet_task.dataset()[:4]
    with ComparisonWatch(model, ["blocks"]) as watch:
        for block in model.blocks:
            block(torch.zeros(4, 3, 16), torch.tensor([0, 1, 2, 3]))
    (asked,) = (a for a in watch.answers if a.comparison == "eq")
    assert (asked.number, watch.answers[asked]) == (unmet_task.RARE_TASK, {False})
    tried = list(iter_unmet_values({asked: {False}}, samples, ["task"]))
    assert [int(s["task"]) for s in tried[0][1].samples] == [7, 1, 7, 3]
    assert not list(iter_unmet_values({asked: {False, True}}, samples, ["task"]))


def test_both_sides_of_an_order_are_tried() -> None:
    late = AskedNumber("net.py:3", "gt", 0.8, is_whole=False)
    samples = [{"t": torch.tensor(0.5)}, {"t": torch.tensor(0.25)}]
    tried = [float(unmet.samples[0]["t"]) for _, unmet in iter_unmet_values({late: {False}}, samples, ["t"])]
    assert min(tried) < 0.8 < max(tried)


def test_numbers_that_do_not_stand_in_a_row_are_replaced() -> None:
    edges = torch.tensor([[0, 1], [1, 2], [2, 0]]).T  # as graphs have them
    asked = AskedNumber("net.py:3", "eq", 1, is_whole=True)
    unmet = unmet_value(asked, [{"edges": edges}, {"edges": edges}], "edges", 7)
    assert unmet is not None and unmet.samples[0]["edges"].flatten()[3] == 7


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_no_whole_number_is_infinite(number: float) -> None:
    asked = AskedNumber("net.py:3", "eq", number, is_whole=False)
    assert not list(
        iter_unmet_values({asked: {False}}, [{"task": torch.tensor(1)}, {"task": torch.tensor(2)}], ["task"])
    )


def test_an_input_that_does_not_reach_a_comparison_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = "(torch.arange(x.shape[1]) >= 12).any()"  # no input moves them
    text = MODEL.read_text().replace("(conditions[0] == RARE_TASK).any()", positions)
    (tmp_path / "model.py").write_text(text)
    tried, run_eager = list[int](), OneRankPlan.run_eager

    def count_trial(rank: OneRankPlan, *arguments: Any, **options: Any) -> LossAndGradients:
        if not options.get("backward", True):
            tried.append(1)
        return run_eager(rank, *arguments, **options)

    monkeypatch.setattr(OneRankPlan, "run_eager", count_trial)
    monkeypatch.setattr(exactness_check, "_refuse_batch_wide_values", lambda *_: None)  # it runs forward, too
    check(tmp_path / "model.py")
    assert len(tried) == 2  # of ids and of task; labels reach no block


def test_what_comparisons_met_tells_whether_an_input_moves_them() -> None:
    def watch_task(*tasks: int) -> ComparisonWatch:
        model = unmet_task.TaggedReader()
        with ComparisonWatch(model, ["blocks"]) as watch:
            model.blocks[0](torch.zeros(len(tasks), 3, 16), torch.tensor(tasks))
        return watch

    watch = watch_task(0, 1)
    (asked,) = (a for a in watch.answers if a.comparison == "eq")
    assert watch.is_unmoved(asked, [watch_task(0, 1)])
    assert not watch.is_unmoved(asked, [])
    assert not watch.is_unmoved(asked, [watch_task(0, 1), watch_task(1, 1)])


def test_a_block_of_torchs_that_holds_a_module_of_the_users_is_none_of_torchs_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.plain = nn.Sequential(unmet_task.Centered()), nn.Sequential(nn.Linear(2, 2))

    graph = fx.Graph()
    for key, block in (("task", "held"), ("width", "plain")):
        graph.call_module(block, (graph.call_function(torch.neg, (graph.placeholder(key),)),))
    graph.placeholder("labels")
    cases, keys = [CapturedCase("c0", frozenset(), GenericGraph(graph, {}, {}))], ["labels", "task", "width"]
    assert inputs_of_own_blocks(cases, Net(), keys) == ["task"]
    assert inputs_of_blocks(cases, [*keys, "raw"]) == ["raw", "task", "width"]
