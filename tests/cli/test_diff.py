"""`secc diff` and `explain --what-if`: lists differences only, and rejects impossible changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from secc import pass_pipeline
from secc.bounds.traffic import Traffic
from secc.cli import main
from secc.driver import what_if
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text
from secc.report.plan_differences import plan_differences
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan, Shard

MODEL = Path(__file__).parent.parent / "models" / "llava_tiny.py"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with separate sections on three ranks."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    compile_model(MODEL, CompileOptions(cluster="local:3", strategy="apart")).write_plan(
        path, lambda plan: ""
    )
    return path


def difference_rows(a: Plan, b: Plan) -> dict[tuple[str, ...], tuple[str, ...]]:
    """(title, first two columns) -> the remaining columns of each row."""
    return {
        (t.title, *row[:2]) if t.title != "Plan" else (t.title, row[0]): row[-2:]
        for t in plan_differences(a, b)
        for row in t.rows
    }


def test_no_differences_to_itself(directory: Path) -> None:
    assert plan_differences(load_plan(directory), load_plan(directory)) == []


def test_differences_of_a_pin(directory: Path) -> None:
    changed = difference_rows(*what_if.replan_with_changes(directory, ["language_model.dp=1"]))
    assert changed["Sections", "language_model", "dp"] == ("2", "1")
    assert ("Plan", "predicted step, s") in changed
    assert not any(key[0] in {"Edges", "Loss", "Parameters"} for key in changed)


def test_differences_of_another_cluster(directory: Path) -> None:
    _, other = what_if.replan_with_changes(directory, ["cluster=local:2"])
    assert (other.world_size, other.cluster["name"]) == (2, "local:2")


def test_same_choice_changes_nothing(directory: Path) -> None:
    assert plan_differences(*what_if.replan_with_changes(directory, ["cluster=local:3"])) == []


def test_number_of_stages_can_change(tmp_path: Path) -> None:
    """A plan can be re-planned for another number of stages than it was captured for."""
    compile_model(
        MODEL.parent / "skips.py", CompileOptions(cluster="local:4", stages=("model.pp=2",))
    ).write_plan(tmp_path / "plan", lambda plan: "")
    steps, _ = what_if.load_before_allocate(tmp_path / "plan")
    assert "stages" not in pass_pipeline.format_pass(steps[0])
    first, other = what_if.replan_with_changes(tmp_path / "plan", ["model.pp=4"])
    assert [s.mesh.pp for s in (*first.user_sections, *other.user_sections)] == [2, 4]
    assert not any(title in {"Edges", "Loss"} for title, *_ in difference_rows(first, other))


def test_assumed_tp_halves_gradient_sums(directory: Path) -> None:
    plan = load_plan(directory)
    asked = replace(plan, sections=tuple(replace(s, mesh=replace(s.mesh, tp=2)) for s in plan.sections))
    _, ir = what_if.load_before_allocate(directory)
    graph = graph_of(module_text.parse_module(ir.read_text()))
    found = what_if._assume_shards(asked, graph)  # pyright: ignore[reportPrivateUsage]
    name = found.sections[0].shards[0].name
    assert 2 * Traffic(found).bytes_on_rank(name) == Traffic(asked).bytes_on_rank(name) > 0


@pytest.mark.parametrize("name", ["listed_experts", "gpt_oss_tiny"])
def test_assumed_experts_are_those_that_the_search_divides(tmp_path: Path, name: str) -> None:
    """Of a plan without ep, asked for ep 4, and of one with ep 4."""
    pins = ("model.dp=4", "model.ep=4")
    shards: list[set[Shard]] = []
    for folder, pinned in (("without", ()), ("with", pins)):
        options = CompileOptions(cluster="local:4", set=pinned)
        compile_model(MODEL.with_name(f"{name}.py"), options).write_plan(tmp_path / folder, lambda plan: "")
        _, other = what_if.replan_with_changes(tmp_path / folder, pins)
        assert other.sections[0].mesh.expert_replicas == 4
        shards.append({s for s in other.sections[0].shards if s.replicas > 1})
    assert shards[0] == shards[1] == set(load_plan(tmp_path / "with").sections[0].shards) != set()


def test_untested_tp_needs_another_compilation(directory: Path) -> None:
    with pytest.raises(UserError, match="was not tested for this section") as error:
        what_if.replan_with_changes(directory, ["language_model.tp=2"])
    assert "compile with --set language_model.tp=2" in error.value.remedy


def test_pinned_tp_is_kept_under_other_choices(tmp_path: Path) -> None:
    """On CPUs only a tp that is asked for is tested."""
    compile_model(
        MODEL.with_name("nano.py"), CompileOptions(cluster="local:2", set=("model.tp=2",))
    ).write_plan(tmp_path, lambda plan: "")
    _, other = what_if.replan_with_changes(tmp_path, ["model.micro_batch=1"])
    assert (other.sections[0].mesh.tp, other.sections[0].micro_batch) == (2, 1)
    with pytest.raises(UserError, match="was not tested for this section") as error:
        what_if.replan_with_changes(tmp_path, ["model.tp=1", "model.tp=4", "cluster=local:4"])
    assert (
        error.value.remedy
        == "compile with --set model.tp=4, which captures the model for it, or set model.tp to 2"
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("dp", "expected a change SECTION.KEY=VALUE, got 'dp'"),
        ("depth=2", "unknown choice 'depth'"),
        ("ranks=two", "not a whole number"),
        ("vision_tower.dp=9", "impossible"),
        ("nothing.dp=1", "unknown section 'nothing'"),
    ],
)
def test_impossible_changes_are_rejected(directory: Path, change: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        what_if.replan_with_changes(directory, [change])


def test_commands_print_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["diff", str(directory), str(directory)],
        ["explain", str(directory), "--what-if", "cluster=local:3"],
    ):
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--json"])
        assert end.value.code in (None, 0)
        assert json.loads(capsys.readouterr().out) == {"equal": True, "tables": []}
