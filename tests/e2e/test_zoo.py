"""Public architectures compile, are exact, and train on three ranks like plain PyTorch: a few by default,
the whole zoo as slow tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from secc.driver.compile import CompiledPlan
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from tools import zoo
from tools.zoo import CAUSES, EXACT, SKIPPED, Row, look, print_table, summarize, train_reference
from tools.zoo_models import entries, entry

QUICK = ("gemma3", "gpt_oss")
SLOW = [e.name for e in entries() if e.name not in QUICK]


@pytest.mark.gloo
@pytest.mark.parametrize("name", QUICK)
def test_architectures_train_exactly(name: str) -> None:
    row = look(entry(name))
    assert (row.check, row.run) == (EXACT, EXACT)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", SLOW)
def test_all_other_architectures_train_exactly(name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    row = look(entry(name))
    assert (row.check, row.run) == (EXACT, EXACT)


@pytest.mark.parametrize(
    "name",
    [e.name if e.name == "reward" else pytest.param(e.name, marks=pytest.mark.slow) for e in entries()],
)
def test_capture_by_layers_is_exact_wherever_capture_by_components_is(name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    row = look(entry(name), run=False, layers=True)
    assert row.check == EXACT and row.layers in (EXACT, SKIPPED)


@pytest.mark.slow
def test_glue_that_depends_on_values_is_rerecorded() -> None:
    row = look(entry("mistral3"), run=False)
    assert (
        row.check == EXACT
        and row.glue == "recorded again"
        and list(row.sections) == ["vision_tower", "language_model"]
    )
    assert "differs between batches" in row.notes[0] and "modeling_mistral3.py:" in row.notes[0]


def test_every_entry_has_a_unique_name_and_a_model_file() -> None:
    names = [e.name for e in entries()]
    assert len(names) == len(set(names)) >= 25
    assert all(f'entry("{e.name}")' in e.source() for e in entries())


def test_the_reference_of_a_model_that_draws_computes_what_the_plan_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[CompileOptions]()

    def refuse_to_compile(_: Path, options: CompileOptions) -> CompiledPlan:
        asked.append(options)
        raise UserError("no further")

    monkeypatch.setattr(zoo, "compile_model", refuse_to_compile)
    given = CompileOptions(
        cluster="local:3", set=("net.dp=3",), strategy="apart", balance_loss="global", gather=("net",)
    )
    compiled = cast(CompiledPlan, SimpleNamespace(plan=SimpleNamespace(draws=(1,)), options=given))
    with pytest.raises(UserError, match="no further"):
        train_reference(compiled, tmp_path / "model.py", tmp_path)
    assert asked == [CompileOptions(cluster="local:1", balance_loss="global", gather=("net",))]


def test_failures_are_listed_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("a", "x", check=EXACT, run=EXACT),
        Row("b", "x", check="m.py:1: the loss is not separable by sample: op"),
        Row("c", "x", check=EXACT, run="run: loss of step 1: 2.0 instead of 1.0"),
        Row("d", "x", check="KeyError: 'k'"),
    ]
    print_table(rows, tmp_path / "zoo.json")
    row = "| b | x | - | - | m.py:1: the loss is not separable by sample: op | - | - | 0.0 | 0.0 |"
    assert row in capsys.readouterr().out
    assert [cells[0] for cells in json.loads((tmp_path / "zoo.json").read_text())["rows"]] == [*"abcd"]
    text = summarize(rows)
    assert "1 of 4 without an error." in text
    causes = dict(
        line.removeprefix("- ").rsplit(": ", 1) for line in text.splitlines() if line.startswith("- ")
    )
    assert sorted(causes.values()) == ["b", "c", "d"] and set(causes) <= {cause for _, cause in CAUSES}
