"""A choice that a closer look finds impossible is taken back, with its reason in the plan, unless the user
pinned it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xdsl.dialects.builtin import ModuleOp

from secc.cluster import GIB
from secc.cost.model.memory import RankMemory
from secc.driver import exactness_check, pass_driver
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions, TakenBack
from secc.driver.taken_back import DIVIDED_LAYERS, FALLBACK_CASES, TakenBackChoices
from secc.errors import ImpossibleChoice, UserError
from secc.frontend.capture.capture import Capture
from secc.ir.analysis.dataflow import get_number
from secc.ir.dialect.ops import graph_of
from secc.passes import split_stages
from secc.passes.split_stages import SplitStages
from secc.report.plan_tables import plan_tables
from secc.runtime.training.eager_reference import ResultDifference

MODEL = Path(__file__).parent.parent / "models" / "one_stack.py"
RESERVED_GIB = 1.5  # of a GPU's memory, for its context
# Links so slow that stages, which send activations only, are faster than replicas, which sum gradients.
SLOW_LINKS = """
nodes: 2
devices: 1
kind: slow
like: H100
memory_gib: {memory}
bf16_tflops: 0.001
f32_tflops: 0.001
memory_gb_s: 1
inside: {{gb_s: 0.001, latency_us: 3}}
between: {{gb_s: 0.001, latency_us: 8}}
"""
PROBLEM = UserError("a value is read in the layers", "model.py:7", "do not read it")


def compile_on_slow_links(folder: Path, free_gib: float = 0.01, **options: Any) -> CompiledPlan:
    cluster = folder / "slow.yaml"
    cluster.write_text(SLOW_LINKS.format(memory=RESERVED_GIB + free_gib))
    return compile_model(MODEL, CompileOptions(cluster=str(cluster), global_batch=12, fuse=False, **options))


def stages(compiled: CompiledPlan) -> int:
    return compiled.plan.user_sections[0].mesh.pp


def fail_capture_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Capture:
        raise PROBLEM

    monkeypatch.setattr(pass_driver, "capture_model", fail)


def fail_ir_of_layers(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[Capture], bool] = lambda capture: True
) -> None:
    """Lets the IR of a capture by layers fail where `fails` says so."""
    made = pass_driver.Planner.__init__

    def initialize(self: pass_driver.Planner, source: pass_driver.CapturedModel, *rest: Any) -> None:
        def make_ir(capture: Capture) -> ModuleOp:
            if any(b.startswith("body.layers.") for b in capture.blocks) and fails(capture):
                raise PROBLEM
            return source.make_ir(capture)

        made(self, replace(source, make_ir=make_ir), *rest)

    monkeypatch.setattr(pass_driver.Planner, "__init__", initialize)


def fail_split(monkeypatch: pytest.MonkeyPatch) -> None:
    split = SplitStages.apply

    def fail(self: SplitStages, ctx: Any, op: ModuleOp) -> None:
        if any((get_number(s, "pp") or 1) > 1 for s in graph_of(op).sections):
            raise PROBLEM
        split(self, ctx, op)

    monkeypatch.setattr(SplitStages, "apply", fail)


@pytest.mark.parametrize(
    "fail", [fail_capture_of_layers, fail_ir_of_layers, fail_split], ids=["capture", "import", "later pass"]
)
def test_stages_that_fail_are_taken_back_with_the_reason(
    fail: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stages(compile_on_slow_links(tmp_path)) == 2
    fail(monkeypatch)
    compiled = compile_on_slow_links(tmp_path)
    assert stages(compiled) == 1
    [record] = compiled.plan.checks["taken_back"]
    assert record["choice"] == "model.pp" and record["where"] == "model.py:7"
    assert "a value is read in the layers" in record["reason"]
    notes = next(t for t in plan_tables(compiled.plan) if t.title == "Notes")
    assert any("model.pp taken back, because" in row[0] for row in notes.rows)


@pytest.mark.parametrize("fail", [fail_capture_of_layers, fail_ir_of_layers, fail_split])
def test_pinned_stages_are_refused_with_the_reason(
    fail: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch)
    with pytest.raises(UserError, match="a value is read in the layers"):
        compile_on_slow_links(tmp_path, set=("model.pp=2",))


def test_a_model_that_needs_what_was_taken_back_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = ("model.sharding=none",)
    assert stages(compile_on_slow_links(tmp_path, 0.0013, set=pins)) == 2
    fail_capture_of_layers(monkeypatch)
    with pytest.raises(UserError, match=r"does not fit: .*; taken back before: model\.pp, because .*layers"):
        compile_on_slow_links(tmp_path, 0.0013, set=pins)


def test_fallback_cases_of_a_capture_by_layers_are_left_out_before_pinned_stages_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = pass_driver.capture_model

    def add_fallback(*args: Any, **options: Any) -> Capture:
        found = capture(*args, **options)
        return replace(found, cases=[*found.cases, replace(found.cases[0], name="spare", is_fallback=True)])

    monkeypatch.setattr(pass_driver, "capture_model", add_fallback)
    fail_ir_of_layers(monkeypatch, lambda found: found.has_fallbacks)
    compiled = compile_on_slow_links(tmp_path, set=("model.pp=2",))
    assert stages(compiled) == 2
    assert [r["choice"] for r in compiled.plan.checks["taken_back"]] == [FALLBACK_CASES]


def compile_three_layers(folder: Path) -> CompiledPlan:
    """A plan in two stages, which would be even with a layer and a half in each."""
    model = folder / "three_layers.py"
    model.write_text(MODEL.read_text().replace("LAYERS = 32, 64, 4", "LAYERS = 32, 64, 3"))
    pins = ("model.pp=2",)
    return compile_model(model, CompileOptions(cluster="local:2", global_batch=12, fuse=False, set=pins))


def blocks_of_middle_layer(compiled: CompiledPlan) -> list[str]:
    return [b for s in compiled.plan.sections for b in s.blocks if b.startswith("body.layers.1")]


def assert_only_divided_layers_are_taken_back(compiled: CompiledPlan) -> None:
    assert stages(compiled) == 2 and blocks_of_middle_layer(compiled) == ["body.layers.1"]
    assert [r["choice"] for r in compiled.plan.checks["taken_back"]] == [DIVIDED_LAYERS]


def test_divided_layers_are_taken_back_before_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"body.layers.1.{part}" for part in ("norm", "up", "down")]
    assert blocks_of_middle_layer(compile_three_layers(tmp_path)) == parts
    fail_ir_of_layers(monkeypatch, lambda found: "body.layers.1.up" in found.blocks)
    assert_only_divided_layers_are_taken_back(compile_three_layers(tmp_path))


def test_divided_layers_that_are_not_exact_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = exactness_check.compare_patterns

    def differ_with_parts(compiled: CompiledPlan, model: Any) -> list[exactness_check.PatternCheck]:
        wrong = ResultDifference(loss=7.0, gradient=0.0, worst="head.weight")
        found = check(compiled, model)
        if len(blocks_of_middle_layer(compiled)) == 1:
            return found
        return [replace(f, comparison=replace(f.comparison, difference=wrong)) for f in found]

    monkeypatch.setattr(exactness_check, "compare_patterns", differ_with_parts)
    checked = exactness_check.check_exactness(compile_three_layers(tmp_path))
    assert_only_divided_layers_are_taken_back(checked)


def test_stages_that_are_not_exact_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = exactness_check.compare_patterns

    def differ_with_stages(compiled: CompiledPlan, model: Any) -> list[exactness_check.PatternCheck]:
        wrong = ResultDifference(loss=7.0, gradient=0.0, worst="head.weight")
        found = check(compiled, model)
        wrong_checks = [replace(f, comparison=replace(f.comparison, difference=wrong)) for f in found]
        return wrong_checks if stages(compiled) > 1 else found

    monkeypatch.setattr(exactness_check, "compare_patterns", differ_with_stages)
    compiled = exactness_check.check_exactness(compile_on_slow_links(tmp_path))
    assert stages(compiled) == 1 and compiled.plan.checks["patterns"][0]["exact"]
    [record] = compiled.plan.checks["taken_back"]
    assert record["choice"] == "model.pp" and "the loss is off by 7 " in record["reason"]
    pinned = compile_on_slow_links(tmp_path, set=("model.pp=2",))
    with pytest.raises(UserError, match=r"model\.pp=2 is impossible: .*does not compute what") as refusal:
        exactness_check.check_exactness(pinned)
    assert refusal.value.remedy == "leave model.pp out"


def test_choices_that_are_not_pinned_are_taken_back_first() -> None:
    record = TakenBackChoices(["lm.pp=2"], [TakenBack("tower.tp", "it was inexact")])
    error = ImpossibleChoice(PROBLEM, ["lm.pp", "tower.pp", "tower.tp"])
    assert record.take_back(error) and record.choices == ("tower.tp", "tower.pp")
    assert not record.take_back(error)  # only the pinned choice is left


def test_fallback_cases_are_taken_back_once() -> None:
    record = TakenBackChoices([])
    assert record.take_back(ImpossibleChoice(PROBLEM, ["lm.pp"]))
    assert record.take_back_fallback_cases(PROBLEM) and record.choices == ()
    assert not record.take_back_fallback_cases(PROBLEM)


def need_more_memory_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each stage need a hundredth of a GiB more than `allocate` counts for it."""
    memory = split_stages.memory_on_rank

    def add_parameters(*args: Any) -> RankMemory:
        found = memory(*args)
        return found._replace(parameters=found.parameters + GIB // 100)

    monkeypatch.setattr(split_stages, "memory_on_rank", add_parameters)


def test_stages_beyond_memory_are_taken_back_with_the_reason_if_a_plan_without_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_more_memory_in_stages(monkeypatch)
    compiled = compile_on_slow_links(tmp_path)
    assert stages(compiled) == 1
    [record] = compiled.plan.checks["taken_back"]
    assert record["choice"] == "model.pp=2" and "one of its 2 stages, would need 0.0" in record["reason"]
    assert stages(compile_on_slow_links(tmp_path, 0.05)) == 2  # there is room for them


@pytest.mark.parametrize(
    "options", [{"free_gib": 0.0013, "set": ("model.sharding=none",)}, {"set": ("model.pp=2",)}]
)
def test_stages_beyond_memory_stay_if_nothing_else_fits_or_they_are_pinned(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_more_memory_in_stages(monkeypatch)
    compiled = compile_on_slow_links(tmp_path, **options)
    assert stages(compiled) == 2 and "taken_back" not in compiled.plan.checks
