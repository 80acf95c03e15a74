"""Text tables: short forms of paths and ranks, merged rows, and columns on narrow terminals."""

from __future__ import annotations

import pytest

from secc.cli import console
from secc.report import tensor_parallel_rows
from secc.report.text_table import TextTable, blocks_text, join_parts_of_layers, paths_text
from secc.runtime.plan.schema import PLAN_VERSION, Mesh, ModelRef, ModuleStyle, Plan, Section


def test_consecutive_layers_are_a_range() -> None:
    paths = ["m.embed", *(f"m.layers.{i}" for i in (0, 1, 2, 4)), "m.2", "head"]
    assert blocks_text(paths) == "m.embed, m.layers.0-2, m.layers.4, m.2, head"
    assert blocks_text(["a.1", "b.2"]) == "a.1, b.2" and blocks_text([]) == ""


def test_parts_of_a_layer_are_the_layer_unless_another_stage_has_some() -> None:
    parts = ["m.layers.3.norm", "m.layers.3.mix"]
    assert join_parts_of_layers(["m.layers.2", *parts, "head"]) == ["m.layers.2", "m.layers.3", "head"]
    assert join_parts_of_layers(parts, others=["m.layers.3.feed"]) == parts
    assert join_parts_of_layers(["m.towers.0.line", "m.layers.0.1"]) == ["m.towers.0.line", "m.layers.0.1"]


@pytest.mark.parametrize(
    ("paths", "line"),
    [
        (["a.b.c", "a.b.d", "a.b.e.f"], "a.b.{c, d, e.f}"),
        (["a.b", "a.b.c"], "a.{b, b.c}"),
        (["ab.c", "a.c"], "ab.c, a.c"),
        (["a.b"], "a.b"),
    ],
)
def test_common_prefix_is_written_once(paths: list[str], line: str) -> None:
    assert paths_text(paths) == line


def stage(i: int, layers: range) -> Section:
    """A stage of `lm` with equally split layers."""
    styles = tuple(
        ModuleStyle(f"lm.layers.{n}.{name}", kind)
        for n in layers
        for name, kind in (("up", "colwise"), ("gate", "colwise"), ("down", "rowwise"))
    )
    mesh = Mesh((2 * i, 2 * i + 1), 1, 1, 2)
    return Section(
        f"lm_{i}", f"sections/lm_{i}.py", "train", (), (), (), mesh, 1, pipeline="lm", stage=i, styles=styles
    )


def test_stages_are_merged_into_their_section() -> None:
    sections = (stage(0, range(0, 3)), stage(1, range(3, 5)))
    plan = Plan(PLAN_VERSION, "", ModelRef("", ""), 4, 4, "own", (), (), sections, (), (), (), {}, {}, {})
    assert tensor_parallel_rows.tensor_parallel_rows(plan) == (
        ("lm", "lm.layers.*.{up, gate}", "5", "split by outputs"),
        ("lm", "lm.layers.*.down", "5", "split by inputs"),
    )


def test_short_columns_are_not_wrapped_if_there_is_space(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = TextTable(
        "T", ("section", "recompute", "blocks"), (("language_model", "selective", "model." + 100 * "x"),)
    )
    for width, whole in ((80, True), (24, False)):
        monkeypatch.setattr(console, "out", console.Console(highlight=False, width=width))
        console.print_table(table)
        shown = capsys.readouterr().out
        assert ("language_model" in shown and "recompute" in shown) is whole
        assert shown.count("x") == 100, "nothing is cut off"
