"""Names that would break generated code: of modules, parameters, classes, dataset keys and sections."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from secc.codegen.python_names import block_attribute_names, section_class_name
from secc.codegen.render import docstring_text, string_literal
from secc.errors import UserError, printable_text
from secc.ir.dialect.argument_template import CallArguments, OperandRef, format_arguments, parse_arguments
from secc.ir.dialect.readable_names import to_identifier
from secc.runtime.recorder.nested_values import iter_tensors, take_at_path
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.models import hostile_names

OTHERS = ("", "😀", "r\r", '"', 'a"', '\\"', "'\"", "\ud800")
NAMES = tuple(dict.fromkeys((*hostile_names.NAMES, *hostile_names.KEYS, *OTHERS)))


@pytest.mark.parametrize("name", NAMES)
def test_literals_are_the_texts(name: str) -> None:
    assert ast.literal_eval(string_literal(name)) == name
    assert printable_text(name).isprintable()
    (docstring,) = ast.parse(f'"""{docstring_text(name)}"""').body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    assert docstring.value.value == name


@pytest.mark.parametrize("name", NAMES)
def test_identifiers_are_identifiers(name: str) -> None:
    (attribute,) = block_attribute_names([f"layers.{name}"]).values()
    for made in (to_identifier(name), section_class_name(to_identifier(name)), attribute):
        ast.parse(f"{made} = 0")


def test_blocks_have_different_attributes() -> None:
    paths = ["a b", "a-b", "a.b", "x.a b", "block_a_b", "group", "x.12", "12", "ﬁne", "fine"]
    names = block_attribute_names(paths, frozenset({"group"}))
    assert len({ast.parse(name).body[0].value.id for name in names.values()}) == len(paths)  # pyright: ignore


def test_arguments_keep_their_names_and_order() -> None:
    arguments = CallArguments([1], {"a": 2, "b c": OperandRef(0), "class": "$0", "d": [OperandRef(1)]})
    text = format_arguments(arguments)
    found = parse_arguments(text)
    assert text == "1, a=2, **{'b c': $0, 'class': '$0', 'd': [$1]}"
    assert found == arguments and list(found.kwargs) == list(arguments.kwargs)


def test_results_are_found_under_any_key() -> None:
    value = {name: [torch.tensor(i)] for i, name in enumerate(NAMES)}
    for (path, tensor), i in zip(iter_tensors(value), range(len(NAMES)), strict=True):
        assert take_at_path(value, path) is tensor and int(tensor) == i


def test_a_model_with_hostile_names_is_exact(root: Path, tmp_path: Path) -> None:
    compiled = compile_and_write(root / "tests/models/hostile_names.py", tmp_path / "plan", global_batch=8)
    assert [p["exact"] for p in compiled.plan.checks["patterns"]] == [True]
    for path in (tmp_path / "plan").rglob("*.py"):
        assert "\x1b" not in path.read_text() and "\0" not in path.read_text()


@pytest.mark.slow
@pytest.mark.gloo
def test_hostile_names_train_as_in_plain_pytorch(models: Path, tmp_path: Path) -> None:
    model = write_recording_model("hostile_names", tmp_path, models)
    pins = (f"first={'+'.join(f'layers.{name}' for name in hostile_names.NAMES[:12])}",)
    made = compile_and_write(model, tmp_path / "plan", cluster="local:2", global_batch=8, sections=pins)
    assert made.plan.world_size == 2
    reference = train_in_one_process(model, 8, 3, tmp_path / "gradients")
    found = train_distributed(tmp_path / "plan", 2, 3, tmp_path / "run")
    assert not list(find_differences(found, reference))


@pytest.mark.parametrize("key", ["a b", "a.b", "a[0]", "two\nlines", "x*most", "", "\x1b[31m", "\ud800"])
def test_keys_that_plans_cannot_name_are_refused(key: str, tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    text = (Path(hostile_names.__file__)).read_text()
    model.write_text(text.replace("KEYS = (", f"KEYS = (\n    {key!r},"))
    with pytest.raises(UserError, match="a batch has the key") as error:
        compile_and_write(model, tmp_path / "plan", global_batch=8)
    assert str(error.value).isascii() and error.value.where.startswith(str(model))


SECTIONS = ("none", "terms", "fused", "batch", "trainer", "path", "class", "section_case", "a_b", "aB")


def test_sections_with_names_of_generated_code_are_exact(tmp_path: Path) -> None:
    text = (Path(hostile_names.__file__)).read_text()
    start = text.index("NAMES = (")
    names = f"NAMES = {SECTIONS!r}\nKEYS = ('x', 'n_x', 'labels_')\n"
    model = tmp_path / "model.py"
    model.write_text(text[:start] + names + text[text.index("WIDTH, ") :])
    pins = tuple(f"{to_identifier(name)}=layers.{name}" for name in SECTIONS)
    compiled = compile_and_write(model, tmp_path / "plan", cluster="local:2", global_batch=8, sections=pins)
    assert {"terms_", "fused_", "class_", "aB"} <= {s.name for s in compiled.plan.sections}
    assert [p["exact"] for p in compiled.plan.checks["patterns"]] == [True]
    for path in (tmp_path / "plan").rglob("*.py"):
        ast.parse(path.read_text())
    imported = (tmp_path / "plan/ranks/rank_00000.py").read_text() + (
        tmp_path / "plan/ranks/rank_00001.py"
    ).read_text()
    assert " import Trainer as " in imported and "import Path as " in imported
